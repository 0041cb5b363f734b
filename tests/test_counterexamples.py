"""Four worked counterexamples: what a policy that looks at the wrong thing does to the law, and what mends it.

Each is run through the library (drafts drawn with its keys, its policies, its verifier), on 200,000 requests, and
tested against the bent law worked out by hand and against the target's own.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specav import policies, survival_probabilities
from specav.costs import cost_table
from specav.features import draft_features
from specav.policies import PolicyInputs
from specav.randomness import DRAFT, draft_keys, request_keys, verdict_keys
from specav.sampling import sample
from specav.verification import DraftBlock, carry_over, speculative_verify
from tests.laws import chi_square

NUMBER = 200_000
A, B = 0, 1


def rows(*probabilities):
    """Logits [NUMBER, len(probabilities), V] with these laws in every request."""
    logits = jnp.log(jnp.asarray(probabilities, jnp.float32))
    return jnp.broadcast_to(logits, (NUMBER, *logits.shape))


def draw_drafts(keys, logits, committed, draw_key=draft_keys):
    """Drafts [NUMBER, K], every position with its own key."""
    columns = [
        sample(draw_key(keys, committed + i, committed), logits[:, i]) for i in range(logits.shape[1])
    ]  # fmt: skip
    return jnp.stack(columns, axis=1)


def first_token_law(tokens):
    return np.bincount(np.asarray(tokens), minlength=2)


def assert_law(counts, law, *, other):
    """The counts follow `law`, and the test could have told it from `other`."""
    assert chi_square(counts, law).passed
    assert not chi_square(counts, other).passed


# (i) target (.5, .5), draft (.2, .8), a draft is discarded when q(drawn) < .5: (.4, .6) under the standard rule.


@functools.partial(jax.jit, static_argnames=("rule", "feature"))
def discard(key, rule, feature):
    keys, zero = request_keys(key, NUMBER), jnp.zeros((NUMBER,), jnp.int32)
    draft, target = rows([0.2, 0.8]), rows([0.5, 0.5], [0.5, 0.5])
    tokens = draw_drafts(keys, draft, zero)
    policy = policies.threshold(feature, 0.0)  # log-odds 0 is probability .5
    inputs = PolicyInputs(draft_features(draft, tokens), tokens, zero + 1)
    n, _ = policy.decide(policy.init(), inputs)
    verifier_rule = "coupled" if rule == "deferred" else rule
    return speculative_verify(keys, tokens, draft, target, zero + 1, n, rule=verifier_rule, positions=zero).tokens[:, 0]


def test_discarding_unlikely_draws_bends_the_law_under_the_standard_rule():
    counts = first_token_law(discard(jax.random.key(0), "standard", "logit_q_sampled"))
    assert_law(counts, [0.4, 0.6], other=[0.5, 0.5])


@pytest.mark.parametrize(("rule", "feature"), [("coupled", "logit_q_sampled"), ("standard", "logit_q_max")])
def test_discarding_is_exact_under_the_coupled_rule_or_by_max_q(rule, feature):
    counts = first_token_law(discard(jax.random.key(0), rule, feature))
    assert_law(counts, [0.5, 0.5], other=[0.4, 0.6])


# (ii) step times 1, 2, 2.22 for 0, 1, 2 verified drafts; a_1 = .8; target (.7, .3), draft (.5, .5); the confidence of
# position 2 is .9 after A and 0 after B. The live argmax gives (.85, .15) under the standard rule.


@functools.partial(jax.jit, static_argnames=("name", "rule"))
def budget(key, name, rule):
    keys, zero = request_keys(key, NUMBER), jnp.zeros((NUMBER,), jnp.int32)
    draft, target = rows([0.5, 0.5], [0.5, 0.5]), rows([0.7, 0.3], [0.7, 0.3], [0.7, 0.3])
    tokens = draw_drafts(keys, draft, zero)
    costs = cost_table(np.asarray([1, 2, 3]), np.asarray([1.0, 2.0, 2.22]))
    policy = {"live": policies.live_argmax, "lagged": policies.trimmer}[name](costs)

    def one(state, tokens):  # every request is a batch of its own, with its own budget
        confidence = jnp.stack([jnp.float32(0.8), jnp.where(tokens[0] == A, 0.9, 0.0)])[None]
        n = jnp.asarray([2], jnp.int32)
        inputs = PolicyInputs(None, tokens[None], n, confidence, survival_probabilities(confidence, n))
        return policy.decide(state, inputs)

    state = policy.init()
    if name == "lagged":  # the budget of a past round, whose first draft was B
        _, state = one(state, jnp.asarray([B, A]))
        n = jax.vmap(lambda t: one(state, t)[0][0])(tokens)
    else:
        n = jax.vmap(lambda t: one(state, t)[0][0])(tokens)
    full = zero + 2
    verifier_rule = "coupled" if rule == "deferred" else rule
    result = speculative_verify(keys, tokens, draft, target, full, n, rule=verifier_rule, positions=zero)
    return n, result.tokens[:, 0]


def test_a_live_budget_bends_the_law_under_the_standard_rule():
    n, tokens = budget(jax.random.key(1), "live", "standard")
    assert set(np.unique(n)) == {0, 2}  # everything after A, nothing after B
    assert_law(first_token_law(tokens), [0.85, 0.15], other=[0.7, 0.3])


@pytest.mark.parametrize(("name", "rule"), [("live", "deferred"), ("lagged", "standard"), ("lagged", "coupled")])
def test_a_lagged_budget_or_the_deferred_rule_is_exact(name, rule):
    _, tokens = budget(jax.random.key(1), name, rule)
    assert_law(first_token_law(tokens), [0.7, 0.3], other=[0.85, 0.15])


# (iii) p = q = (.5, .5), K = 2, standard rule. Round 1 verifies nothing; round 2 verifies iff round 1's x_2 was A. With
# drafts keyed by position alone round 2 draws that very x_2 again: P(A) = .75.


@functools.partial(jax.jit, static_argnames="by_position")
def redraft(key, by_position):
    keys, zero = request_keys(key, NUMBER), jnp.zeros((NUMBER,), jnp.int32)
    half = [0.5, 0.5]
    draft, target, full = rows(half, half), rows(half, half, half), zero + 2

    def position_key(keys, positions, committed):
        return verdict_keys(keys, positions, DRAFT)

    draw_key = position_key if by_position else draft_keys
    first = draw_drafts(keys, draft, zero, draw_key)
    speculative_verify(keys, first, draft, target, full, zero, rule="standard", positions=zero)
    second = draw_drafts(keys, draft, zero + 1, draw_key)
    n = jnp.where(first[:, 1] == A, 2, 0)
    return speculative_verify(keys, second, draft, target, full, n, rule="standard", positions=zero + 1).tokens[:, 0]


def test_drafts_keyed_by_position_alone_bend_the_law():
    assert_law(first_token_law(redraft(jax.random.key(2), True)), [0.75, 0.25], other=[0.5, 0.5])


def test_drafts_keyed_by_commitment_are_exact():
    assert_law(first_token_law(redraft(jax.random.key(2), False)), [0.5, 0.5], other=[0.75, 0.25])


# (iv) two requests, p = q = (.5, .5), each verified iff the other drew A: every marginal is exact, the joint law is
# (.3125, .1875, .1875, .3125) instead of .25 each.


@functools.partial(jax.jit, static_argnames=("rule", "sequential"))
def two_requests(key, rule, sequential):
    keys, zero = request_keys(key, 2 * NUMBER), jnp.zeros((2 * NUMBER,), jnp.int32)
    half = jnp.log(jnp.full((2 * NUMBER, 2, 2), 0.5))
    tokens = draw_drafts(keys, half[:, :1], zero)
    x, y = tokens[:NUMBER, 0], tokens[NUMBER:, 0]
    # Sequential: the first request is verified unseen, and what that reveals decides about the second.
    n = jnp.concatenate([jnp.ones_like(x) if sequential else (y == A).astype(jnp.int32), (x == A).astype(jnp.int32)])
    verifier_rule = "coupled" if rule == "deferred" else rule
    result = speculative_verify(keys, tokens, half[:, :1], half, zero + 1, n, rule=verifier_rule, positions=zero)
    return 2 * result.tokens[:NUMBER, 0] + result.tokens[NUMBER:, 0]


JOINT = [0.3125, 0.1875, 0.1875, 0.3125]


def test_a_live_decision_across_requests_bends_the_joint_law_and_no_marginal():
    pairs = np.asarray(two_requests(jax.random.key(3), "standard", False))
    assert_law(np.bincount(pairs, minlength=4), JOINT, other=[0.25] * 4)
    for marginal in (pairs // 2, pairs % 2):
        assert chi_square(np.bincount(marginal, minlength=2), [0.5, 0.5]).passed


@pytest.mark.parametrize(("rule", "sequential"), [("standard", True), ("deferred", False)])
def test_admission_in_order_or_the_deferred_rule_keeps_the_joint_law(rule, sequential):
    pairs = np.asarray(two_requests(jax.random.key(3), rule, sequential))
    assert_law(np.bincount(pairs, minlength=4), [0.25] * 4, other=JOINT)


def test_deferral_carries_the_untested_draft_of_the_second_example():
    # The exactness of the live budget rests on it: after B the draft x_2 is kept, not redrawn.
    tokens = jnp.asarray([[B, A]])
    block = DraftBlock(tokens, None, jnp.asarray([2]), jnp.zeros((1, 2), jnp.int32))
    sure = jnp.where(jax.nn.one_hot(jnp.asarray([[B, A, A]]), 2, dtype=jnp.bool_), 0.0, -jnp.inf)
    result = speculative_verify(jax.random.key(0), tokens, None, sure, block.num_drafts, jnp.asarray([0]))
    kept = carry_over(block, result)
    assert result.num_accepted[0] == 1 and kept.num_drafts[0] == 1 and kept.tokens[0].tolist() == [A, -1]
