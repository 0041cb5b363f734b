"""Stopping rules and ranked policies by hand: where they cut, what they keep, and how adaptive ones move."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specav import policies
from specav.costs import cost_table
from specav.features import DraftFeatures
from specav.policies import PolicyInputs
from specav.survival import survival_probabilities
from specav.trimmer import choose_budget

K = 3


def log_odds(probabilities):
    p = jnp.asarray(probabilities, jnp.float32)
    return jnp.log(p) - jnp.log1p(-p)


def round_of(drawn, *, entropy=None, acceptance=None, num_drafts=None, **more):
    """Inputs with these probabilities of the drawn tokens, float [B, K]."""
    rows = len(drawn)
    num_drafts = jnp.full((rows,), K, jnp.int32) if num_drafts is None else jnp.asarray(num_drafts, jnp.int32)
    features = DraftFeatures(
        logit_q_sampled=log_odds(drawn), entropy=None if entropy is None else jnp.asarray(entropy, jnp.float32)
    )
    zero = jnp.zeros((rows,), jnp.int32)
    survival = None
    if acceptance is not None:
        acceptance = jnp.asarray(acceptance, jnp.float32)
        survival = survival_probabilities(acceptance, num_drafts)
    given = {"last_accepted": zero, "last_tested": zero} | more
    return PolicyInputs(features, None, num_drafts, acceptance, survival, **given)


def decide(policy, inputs, state=None):
    return policy.decide(policy.init() if state is None else state, inputs)[0].tolist()


DRAWN = [[0.9, 0.3, 0.9], [0.3, 0.9, 0.9], [0.9, 0.9, 0.9], [0.9, 0.9, 0.3]]


def test_discarding_drops_the_unsure_draft_and_stopping_after_keeps_it():
    inputs = round_of(DRAWN)
    assert decide(policies.threshold("logit_q_sampled", 0.0), inputs) == [1, 0, 3, 2]
    assert decide(policies.confidence_stop(0.5), inputs) == [2, 1, 3, 3]
    assert decide(policies.confidence_stop(0.5), round_of(DRAWN, num_drafts=[1, 0, 2, 3])) == [1, 0, 2, 3]
    nan = jnp.asarray(DRAWN).at[2, 1].set(jnp.nan)
    assert decide(policies.confidence_stop(0.5), round_of(nan)) == [2, 1, 2, 3]


def test_specdec_keeps_the_draft_at_which_rejection_becomes_likely():
    inputs = round_of(DRAWN, acceptance=[[0.9, 0.9, 0.9], [0.2, 0.9, 0.9], [0.7, 0.7, 0.7], [0.9, 0.3, 0.9]])
    assert decide(policies.specdec_stop(0.5), inputs) == [3, 1, 2, 2]
    assert decide(policies.survival_threshold(0.5), inputs) == [3, 0, 1, 1]


def test_entropy_rules_stop_before_the_unsure_draft():
    entropy = [[0.1, 0.7, 0.1], [0.7, 0.1, 0.1], [0.0, 0.0, 0.0], [0.1, jnp.nan, 0.1]]
    inputs = round_of(DRAWN, entropy=entropy)
    assert decide(policies.entropy_stop(0.15, 0.3), inputs) == [1, 0, 3, 1]  # sqrt(.15 * .7) = .324
    assert decide(policies.adaedl(0.2, 0.7), inputs) == [1, 0, 3, 1]  # 1 - sqrt(.2 * .7) = .626
    assert decide(policies.adaedl(0.2, 0.6), inputs) == [3, 3, 3, 1]


def test_cumulative_confidence_multiplies():
    inputs = round_of([[0.9, 0.5, 0.9], [0.3, 0.9, 0.9], [0.8, 0.8, 0.8], [0.39, 1.0, 1.0]])
    assert decide(policies.cumulative_confidence(0.4), inputs) == [3, 0, 3, 0]


def test_tetris_takes_the_best_of_the_batch():
    inputs = round_of([[0.9, 0.5, 0.9], [0.3, 0.9, 0.9], [0.8, 0.8, 0.8], [0.1, 0.5, 0.5]])
    # Scores .9 .45 .405 | .3 .27 .243 | .8 .64 .512 | .1 ...
    assert [decide(policies.tetris(b), inputs) for b in (0, 1, 3, 5, 12)] == [
        [0, 0, 0, 0],
        [1, 0, 0, 0],
        [1, 0, 2, 0],
        [2, 0, 3, 0],
        [3, 3, 3, 3],
    ]
    assert decide(policies.tetris(5, method="pairwise"), inputs) == [2, 0, 3, 0]


@pytest.mark.parametrize("num_requests", [1, 2])
def test_draft_and_verify_moves_its_threshold_with_what_was_accepted(num_requests):
    policy = policies.draft_and_verify(
        initial=0.5, goal=0.6, step=0.1, acceptance_decay=0.0, threshold_decay=0.0, num_requests=num_requests
    )
    sure = [[0.55, 0.55, 0.55], [0.55, 0.55, 0.55]]
    step = jax.jit(policy.decide)
    verdicts = lambda accepted, tested: {  # noqa: E731
        "last_accepted": jnp.asarray(accepted, jnp.int32),
        "last_tested": jnp.asarray(tested, jnp.int32),
    }
    n, state = step(policy.init(), round_of(sure))  # nothing was tested yet: nothing moves
    assert n.tolist() == [3, 3] and state.threshold.tolist() == [0.5] * num_requests
    n, state = step(state, round_of(sure, **verdicts([0, 3], [3, 3])))
    # Pooled: half accepted, below the goal: up. Apart: request 0 up, request 1 down.
    expected = [0.6] if num_requests == 1 else [0.6, 0.4]
    np.testing.assert_allclose(state.threshold, expected, rtol=1e-6)
    n, _ = step(state, round_of(sure))
    assert n.tolist() == ([1, 1] if num_requests == 1 else [1, 3])
    three = policies.draft_and_verify(num_requests=3)
    with pytest.raises(ValueError, match="num_requests: expected 1 or B=2, got 3"):
        three.decide(three.init(), round_of(sure))


def test_the_threshold_stays_a_probability():
    policy = policies.draft_and_verify(initial=1.0, step=1.0, threshold_decay=0.0)
    accepted = {"last_accepted": jnp.asarray([0], jnp.int32), "last_tested": jnp.asarray([3], jnp.int32)}
    _, state = policy.decide(policy.init(), round_of([[0.5, 0.5, 0.5]], **accepted))
    assert state.threshold.tolist() == [1.0]


def test_mean_thresholds_look_where_they_say():
    inputs = round_of([[0.4, 0.2, 0.1], [0.9, 0.9, 0.9]])
    # Log-odds of row 0: -.41, -1.39, -2.20, mean -1.33; of row 1: 2.20.
    assert decide(policies.mean_threshold("logit_q_sampled", 0.0, over="block"), inputs) == [1, 3]
    assert decide(policies.mean_threshold("logit_q_sampled", 0.0, over="batch"), inputs) == [0, 3]
    assert decide(policies.mean_threshold("logit_q_sampled", -5.0, over="batch"), inputs) == [3, 3]


def test_clearing_drops_short_selections():
    inner = policies.threshold("logit_q_sampled", 0.0)
    assert decide(policies.clear_short(inner, 2), round_of(DRAWN)) == [0, 0, 3, 2]
    assert decide(policies.clear_short(inner, 1), round_of(DRAWN)) == [1, 0, 3, 2]
    assert policies.clear_short(inner, 2).window == "block" and policies.clear_short(inner, 1).window == "causal"


def test_an_early_stop_is_blind_to_what_comes_after():
    # Step times 1, 2, 2.05: the first draft never pays, both together would.
    costs = cost_table([1, 2, 3], [1.0, 2.0, 2.05])
    survival, n = jnp.asarray([[0.95, 0.9]]), jnp.asarray([2])
    assert choose_budget(survival, n, costs, 1, 1) == 2
    assert choose_budget(survival, n, costs, 1, 1, search="early_stop") == 0
    rising = cost_table([1, 2, 3], [1.0, 1.3, 2.5])
    assert choose_budget(survival, n, rising, 1, 1, search="early_stop") == 1
    inputs = PolicyInputs(num_drafts=n, survival=survival)
    assert decide(policies.early_stop(rising), inputs) == [1]
    assert decide(policies.early_stop(costs), inputs) == [0] and decide(policies.live_argmax(costs), inputs) == [2]


def test_names_and_numbers_are_checked(own_checks):
    for make, message in (
        (lambda: policies.stop_after("max", 0.0), "feature_name: expected one of"),
        (lambda: policies.mean_threshold("entropy", 0.0, over="all"), "over: expected one of 'block', 'batch'"),
        (lambda: policies.confidence_stop(1.5), "confidence: expected a number in"),
        (lambda: policies.adaedl(0.2, 2.0), "minimum: expected a number in"),
        (lambda: policies.clear_short(policies.everything(), 0), "minimum_length: expected an int of at least 1"),
        (lambda: policies.draft_and_verify(step=-0.1), "step: expected a number in"),
        (lambda: choose_budget(jnp.ones((1, 1)), jnp.ones(1, int), None, 1, 1, search="x"), "search: expected one of"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
    with pytest.raises(ValueError, match=r"inputs\.last_accepted: policy 'draft_and_verify' reads it, got None"):
        policies.draft_and_verify().decide(
            policies.draft_and_verify().init(), round_of([[0.5] * 3])._replace(last_accepted=None)
        )
