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
HALF = (0.5, 0.5)


# Four programs for all examples: NUMBER requests, K = 2 and V = 2; an example with one draft leaves x_2 unused.


@functools.partial(jax.jit, static_argnames="by_position")
def draw_drafts(key, laws, committed, by_position=False):
    """Keys [NUMBER] and drafts [NUMBER, 2] of the laws [2, 2], every position with its own key."""
    keys, committed = request_keys(key, NUMBER), jnp.full((NUMBER,), committed)
    columns = []
    for i in range(2):
        logits = jnp.broadcast_to(jnp.log(laws[i]), (NUMBER, 2))
        at = verdict_keys(keys, committed + i, DRAFT) if by_position else draft_keys(keys, committed + i, committed)
        columns.append(sample(at, logits))
    return keys, jnp.stack(columns, axis=1)


@functools.partial(jax.jit, static_argnames="rule")
def verified(keys, tokens, laws, target, committed, num_drafts, num_verified, rule):
    """The first token of every request; laws [2, 2] of the drafts, target [3, 2]."""
    draft, target = (jnp.broadcast_to(jnp.log(x), (NUMBER, *x.shape)) for x in (laws, target))
    full = jnp.full((NUMBER,), 1)
    result = speculative_verify(
        keys, tokens, draft, target, num_drafts * full, num_verified, rule=rule, positions=committed * full
    )
    return result.tokens[:, 0]


def first_tokens(keys, tokens, draft, target, num_drafts, num_verified, rule, committed=0):
    laws, target = np.asarray([draft] * 2, np.float32), np.asarray([target] * 3, np.float32)
    numbers = np.int32(committed), np.int32(num_drafts), np.asarray(num_verified, np.int32)
    rule = "coupled" if rule == "deferred" else rule  # the deferred rule is the coupled one, and keeps what is untested
    return np.asarray(verified(keys, tokens, laws, target, *numbers, rule=rule))


def drafts(seed, law, committed=0, by_position=False):
    keys, tokens = draw_drafts(
        jax.random.key(seed), np.asarray([law] * 2, np.float32), np.int32(committed), by_position
    )
    return keys, np.asarray(tokens)


def first_token_law(tokens):
    return np.bincount(np.asarray(tokens), minlength=2)


def assert_law(counts, law, *, other):
    """The counts follow `law`, and the test could have told it from `other`."""
    assert chi_square(counts, law).passed
    assert not chi_square(counts, other).passed


# (i) target (.5, .5), draft (.2, .8), a draft is discarded when q(drawn) < .5: (.4, .6) under the standard rule.


def discard(rule, feature):
    keys, tokens = drafts(0, (0.2, 0.8))
    policy = policies.threshold(feature, 0.0)  # log-odds 0 is probability .5
    draft = jnp.log(jnp.asarray([[[0.2, 0.8]]] * 2, jnp.float32))
    either = jnp.asarray([[A], [B]])  # a decision depends on the token alone
    inputs = PolicyInputs(draft_features(draft, either), either, jnp.ones((2,), jnp.int32))
    n = np.asarray(policy.decide(policy.init(), inputs)[0])[tokens[:, 0]]
    return first_tokens(keys, tokens, (0.2, 0.8), HALF, 1, n, rule)


def test_discarding_unlikely_draws_bends_the_law_under_the_standard_rule():
    counts = first_token_law(discard("standard", "logit_q_sampled"))
    assert_law(counts, [0.4, 0.6], other=[0.5, 0.5])


@pytest.mark.parametrize(("rule", "feature"), [("coupled", "logit_q_sampled"), ("standard", "logit_q_max")])
def test_discarding_is_exact_under_the_coupled_rule_or_by_max_q(rule, feature):
    counts = first_token_law(discard(rule, feature))
    assert_law(counts, [0.5, 0.5], other=[0.4, 0.6])


# (ii) step times 1, 2, 2.22 for 0, 1, 2 verified drafts; a_1 = .8; target (.7, .3), draft (.5, .5); the confidence of
# position 2 is .9 after A and 0 after B. The live argmax gives (.85, .15) under the standard rule.


def budget(name, rule):
    keys, tokens = drafts(1, HALF)
    costs = cost_table(np.asarray([1, 2, 3]), np.asarray([1.0, 2.0, 2.22]))
    policy = {"live": policies.live_argmax, "lagged": policies.trimmer}[name](costs)
    decide = jax.jit(policy.decide)

    def one(state, first):  # every request is a batch of its own, with its own budget
        confidence = jnp.asarray([[0.8, 0.9 if first == A else 0.0]], jnp.float32)
        n = jnp.asarray([2], jnp.int32)
        drawn = jnp.asarray([[first, A]], jnp.int32)
        n, state = decide(state, PolicyInputs(None, drawn, n, confidence, survival_probabilities(confidence, n)))
        return int(n[0]), state

    state = policy.init()
    if name == "lagged":  # the budget of a past round, whose first draft was B
        _, state = one(state, B)
    n = np.asarray([one(state, first)[0] for first in (A, B)])[tokens[:, 0]]
    return n, first_tokens(keys, tokens, HALF, (0.7, 0.3), 2, n, rule)


def test_a_live_budget_bends_the_law_under_the_standard_rule():
    n, tokens = budget("live", "standard")
    assert set(np.unique(n)) == {0, 2}  # everything after A, nothing after B
    assert_law(first_token_law(tokens), [0.85, 0.15], other=[0.7, 0.3])


@pytest.mark.parametrize(("name", "rule"), [("live", "deferred"), ("lagged", "standard"), ("lagged", "coupled")])
def test_a_lagged_budget_or_the_deferred_rule_is_exact(name, rule):
    _, tokens = budget(name, rule)
    assert_law(first_token_law(tokens), [0.7, 0.3], other=[0.85, 0.15])


# (iii) p = q = (.5, .5), K = 2, standard rule. Round 1 verifies nothing; round 2 verifies iff round 1's x_2 was A. With
# drafts keyed by position alone round 2 draws that very x_2 again: P(A) = .75.


def redraft(by_position):
    _, first = drafts(2, HALF, 0, by_position)
    keys, second = drafts(2, HALF, 1, by_position)
    n = np.where(first[:, 1] == A, 2, 0)
    return first_tokens(keys, second, HALF, HALF, 2, n, "standard", committed=1)


def test_drafts_keyed_by_position_alone_bend_the_law():
    assert_law(first_token_law(redraft(True)), [0.75, 0.25], other=[0.5, 0.5])


def test_drafts_keyed_by_commitment_are_exact():
    assert_law(first_token_law(redraft(False)), [0.5, 0.5], other=[0.75, 0.25])


# (iv) two requests, p = q = (.5, .5), each verified iff the other drew A: every marginal is exact, the joint law is
# (.3125, .1875, .1875, .3125) instead of .25 each.


def two_requests(rule, sequential):
    keys, tokens = drafts(3, HALF)
    x, y = np.split(tokens[:, 0], 2)  # the first half of the requests, each with one of the second half
    # Sequential: the first request is verified unseen, and what that reveals decides about the second.
    n = np.concatenate([np.ones_like(x) if sequential else y == A, x == A])
    first, second = np.split(first_tokens(keys, tokens, HALF, HALF, 1, n, rule), 2)
    return 2 * first + second


JOINT = [0.3125, 0.1875, 0.1875, 0.3125]


def test_a_live_decision_across_requests_bends_the_joint_law_and_no_marginal():
    pairs = two_requests("standard", False)
    assert_law(np.bincount(pairs, minlength=4), JOINT, other=[0.25] * 4)
    for marginal in (pairs // 2, pairs % 2):
        assert chi_square(np.bincount(marginal, minlength=2), [0.5, 0.5]).passed


@pytest.mark.parametrize(("rule", "sequential"), [("standard", True), ("deferred", False)])
def test_admission_in_order_or_the_deferred_rule_keeps_the_joint_law(rule, sequential):
    pairs = two_requests(rule, sequential)
    assert_law(np.bincount(pairs, minlength=4), [0.25] * 4, other=JOINT)


def test_deferral_carries_the_untested_draft_of_the_second_example():
    # The exactness of the live budget rests on it: after B the draft x_2 is kept, not redrawn.
    @jax.jit
    def one_round(key, tokens, none):
        block = DraftBlock(tokens, None, none + 2, jnp.zeros((1, 2), jnp.int32))
        sure = jnp.where(jax.nn.one_hot(jnp.asarray([[B, A, A]]), 2, dtype=jnp.bool_), 0.0, -jnp.inf)
        result = speculative_verify(key, tokens, None, sure, block.num_drafts, none)
        return result.num_accepted, carry_over(block, result)

    num_accepted, kept = one_round(jax.random.key(0), np.asarray([[B, A]], np.int32), np.zeros(1, np.int32))
    assert num_accepted[0] == 1 and kept.num_drafts[0] == 1 and kept.tokens[0].tolist() == [A, -1]
