"""The decoding loop: the target's law, greedy continuation, bitwise deferral, limits and EOS, one compilation."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specav import estimators, policies
from specav.costs import cost_table
from specav.decode import decoder, speculative_decode
from specav.drafting import autoregressive_drafter, parallel_drafter, point_mass_drafter
from specav.sampling import SamplingParams
from tests.helpers import assert_stays_on_device, bigram_model, count_traces
from tests.laws import at_total_variation, chi_square

SIZE, WIDTH, LENGTH = 3, 2, 4


def bigram(seed, size=SIZE, scale=1.0):
    return np.random.default_rng(seed).normal(size=(size, size)) * scale


def sequence_law(table, first, length=LENGTH):
    """Exact law of the next `length` tokens of a bigram model, float64, in lexicographic order."""
    law = np.exp(table - table.max(axis=1, keepdims=True))
    law /= law.sum(axis=1, keepdims=True)
    size = len(table)
    masses = []
    for sequence in itertools.product(range(size), repeat=length):
        steps = zip((first, *sequence[:-1]), sequence, strict=True)
        masses.append(np.prod([law[a, b] for a, b in steps]))
    return np.asarray(masses)


def sequence_counts(tokens, size=SIZE):
    """How often each sequence was decoded; tokens int [B, length]."""
    index = np.zeros(len(tokens), np.int64)
    for column in np.asarray(tokens).T:
        index = index * size + column
    return np.bincount(index, minlength=size ** tokens.shape[1])


def no_prefill(state, prompts, lengths):
    return state


def drafters(table, width=WIDTH):
    """Every kind of drafter over one bigram table."""
    model = bigram_model(table)
    table = jnp.asarray(table, jnp.float32)

    def last(context):
        return jnp.take_along_axis(context.tokens, context.lengths[:, None] - 1, axis=1)[:, 0]

    def laws(state, context):  # every position from the last committed token: no draw is needed
        return jnp.broadcast_to(table[last(context)][:, None], (len(context.lengths), width, len(table))), state

    def guess(state, context):
        token, guesses = last(context), []
        for _ in range(width):
            token = jnp.argmax(table[token], axis=-1).astype(jnp.int32)
            guesses.append(token)
        return jnp.stack(guesses, axis=1), state

    return {
        "autoregressive": autoregressive_drafter(model, width),
        "parallel": parallel_drafter(no_prefill, laws, width),
        "point_mass": point_mass_drafter(no_prefill, guess),
    }


COSTS = cost_table(np.arange(1, 9), np.asarray([1.0, 1.0, 1.1, 1.5, 1.5, 2.0, 2.4, 3.0]))


def pairs():
    """Lossless pairs of rule and policy (and refill), with an estimator where the policy reads one."""
    learn = functools.partial(estimators.online_logistic, WIDTH, refit_interval=1)
    token = functools.partial(estimators.online_logistic, WIDTH, ("logit_q_sampled", "entropy"), refit_interval=1)
    return {
        "standard, everything": ("standard", "block", policies.everything(), None),
        "standard, fixed": ("standard", "block", policies.fixed(1), None),
        "standard, max q": ("standard", "block", policies.threshold("logit_q_max", 0.2), None),
        "standard, trimmer": ("standard", "block", policies.trimmer(COSTS), learn()),
        "coupled, nothing": ("coupled", "block", policies.nothing(), None),
        "coupled, drawn q": ("coupled", "block", policies.threshold("logit_q_sampled", 0.0), None),
        "coupled, trimmer": ("coupled", "block", policies.trimmer(COSTS), token()),
        "deferred, live budget": ("deferred", "block", policies.live_argmax(COSTS), token()),
        "deferred, eager": ("deferred", "eager", policies.threshold("logit_q_sampled", 0.3), token()),
    }


def decode_tokens(target_table, drafter, rule, refill, policy, estimator, *, batch, num_greedy=0, **options):
    """Decodes `batch` requests from token 0, the first `num_greedy` of them greedily."""
    loop = decoder(
        bigram_model(jnp.asarray(target_table, jnp.float32)),
        drafter,
        num_draft_tokens=WIDTH,
        max_new_tokens=LENGTH,
        policy=policy,
        estimator=estimator,
        rule=rule,
        refill=refill,
        sampling=SamplingParams(jnp.where(jnp.arange(batch) < num_greedy, 0.0, 1.0)),
        draft_sampling=SamplingParams(),
        **options,
    )

    @jax.jit
    def run(key):
        prompts = jnp.zeros((batch, 1), jnp.int32)
        return loop.run(loop.init(key, prompts, jnp.ones((batch,), jnp.int32), (), ()))

    return run(jax.random.key(0))


@pytest.mark.parametrize("pair", list(pairs()))
def test_decoded_sequences_follow_the_target_law_and_greedy_ones_its_maximum(pair):
    rule, refill, policy, estimator = pairs()[pair]
    target, draft = bigram(1), bigram(2)
    batch, greedy = 100_000, 500
    drafter = drafters(draft)["autoregressive"]
    state = decode_tokens(target, drafter, rule, refill, policy, estimator, batch=batch, num_greedy=greedy)
    assert (state.positions == 1 + LENGTH).all() and state.finished.all()
    tokens = np.asarray(state.tokens[:, 1:])
    test = chi_square(sequence_counts(tokens[greedy:]), sequence_law(target, 0))
    assert test.passed and test.detectable_tv < 0.025, test
    expected, token = [], 0
    for _ in range(LENGTH):
        token = int(np.argmax(target[token]))
        expected.append(token)
    assert (tokens[:greedy] == np.asarray(expected)).all()


@pytest.mark.parametrize("kind", ["parallel", "point_mass"])
@pytest.mark.parametrize("rule", ["standard", "coupled", "deferred"])
def test_every_kind_of_drafter_is_lossless(kind, rule):
    target, draft = bigram(3), bigram(4)
    drafter = drafters(draft)[kind]
    policy = policies.fixed(1)
    state = decode_tokens(target, drafter, rule, "block", policy, None, batch=100_000)
    assert chi_square(sequence_counts(np.asarray(state.tokens[:, 1:])), sequence_law(target, 0)).passed


def test_a_target_that_is_off_by_two_percent_is_seen():
    target, draft = bigram(1), bigram(2)
    row = np.exp(target[0]) / np.exp(target[0]).sum()
    wrong = target.copy()
    wrong[0] = np.log(at_total_variation(row, 0.02))
    state = decode_tokens(wrong, drafters(draft)["autoregressive"], "coupled", "block", None, None, batch=100_000)
    assert not chi_square(sequence_counts(np.asarray(state.tokens[:, 1:])), sequence_law(target, 0)).passed


def test_a_leaking_policy_is_refused_and_bends_the_law():
    target = np.log(np.asarray([[0.5, 0.5], [0.5, 0.5]]))
    draft = np.log(np.asarray([[0.2, 0.8], [0.2, 0.8]]))
    leak = policies.threshold("logit_q_sampled", 0.0)
    drafter = drafters(draft)["autoregressive"]
    with pytest.raises(ValueError, match=r"logit_q_sampled.*standard"):
        decode_tokens(target, drafter, "standard", "block", leak, None, batch=4)
    state = decode_tokens(target, drafter, "standard", "block", leak, None, batch=100_000, require_lossless=False)
    counts = sequence_counts(np.asarray(state.tokens[:, 1:2]), 2)
    assert not chi_square(counts, [0.5, 0.5]).passed


# --------------------------------------------------------------------------------- bitwise equality, batch-mates


EVERYTHING, NOTHING, FIXED = policies.everything(), policies.nothing(), policies.fixed(1)
NEW_TOKENS = np.asarray([64, 10, 64, 33, 1, 0])
PROMPT_LENGTHS = np.asarray([1, 2, 3, 4, 4, 1])


@functools.cache
def long_loop(policy, rule, refill):
    target, draft = bigram(20, 12), bigram(21, 12) * 0.5 + bigram(20, 12)
    loop = decoder(
        bigram_model(jnp.asarray(target, jnp.float32)),
        autoregressive_drafter(bigram_model(jnp.asarray(draft, jnp.float32)), 5),
        num_draft_tokens=5,
        max_new_tokens=64,
        policy=policy,
        rule=rule,
        refill=refill,
        require_lossless=False,
    )
    return jax.jit(lambda k, p, n, m: loop.run(loop.init(k, p, n, (), (), token_limits=m)))


def long_run(policy, rule="deferred", refill="block", rows=range(6)):
    """Up to 64 new tokens for 6 requests of different lengths and limits, over bigram tables of 12 tokens."""
    rows = np.asarray(rows)
    keys = jax.random.split(jax.random.key(5), 6)[rows]
    prompts = jax.random.randint(jax.random.key(6), (6, 4), 0, 12)[rows]
    return long_loop(policy, rule, refill)(
        keys, prompts, jnp.asarray(PROMPT_LENGTHS[rows]), jnp.asarray(NEW_TOKENS[rows])
    )


def random_policy(seed):
    """Verifies a random number of drafts, looking at everything."""

    def decide(state, inputs):
        key, sub = jax.random.split(state)
        n = jax.random.randint(sub, inputs.num_drafts.shape, 0, inputs.num_drafts + 1)
        return jnp.where(inputs.draft_tokens[:, -1] % 2 == 0, n, inputs.num_drafts // 2), key

    return policies.everything()._replace(init=lambda: jax.random.key(seed), decide=decide, window="block")


@pytest.mark.parametrize("policy", [random_policy(0), NOTHING, policies.live_argmax(COSTS)])
def test_deferred_decoding_is_bitwise_that_of_verifying_everything(policy):
    everything, trimmed = long_run(EVERYTHING), long_run(policy)
    np.testing.assert_array_equal(trimmed.tokens, everything.tokens)
    assert trimmed.statistics.verified.sum() < everything.statistics.verified.sum()
    # A block is drawn once, whatever is trimmed: nothing is redrafted.
    np.testing.assert_array_equal(trimmed.statistics.drafted, everything.statistics.drafted)


def test_eager_refill_is_not_bitwise_but_drafts_more_often():
    block, eager = long_run(NOTHING), long_run(NOTHING, refill="eager")
    assert eager.statistics.rounds.sum() <= block.statistics.rounds.sum()


@pytest.mark.parametrize("rule", ["standard", "coupled", "deferred"])
def test_tokens_do_not_change_with_batch_mates_or_their_order(rule):
    whole = long_run(FIXED, rule)
    order = [3, 0, 5, 1, 4, 2]
    shuffled = long_run(FIXED, rule, rows=order)
    np.testing.assert_array_equal(shuffled.tokens, whole.tokens[jnp.asarray(order)])
    np.testing.assert_array_equal(long_run(FIXED, rule, rows=[2]).tokens, whole.tokens[2:3])


# ------------------------------------------------------------------------------------------- limits, EOS, counts


@pytest.mark.parametrize("rule", ["standard", "coupled", "deferred"])
@pytest.mark.parametrize("policy", [EVERYTHING, NOTHING, FIXED])
def test_limits_lengths_and_counts(rule, policy):
    state = long_run(policy, rule)
    lengths, new = PROMPT_LENGTHS, NEW_TOKENS
    np.testing.assert_array_equal(state.positions, lengths + new)
    tokens = np.asarray(state.tokens)
    for b in range(6):
        assert (tokens[b, : lengths[b] + new[b]] >= 0).all() and (tokens[b, lengths[b] + new[b] :] == -1).all()
    counts = state.statistics
    np.testing.assert_array_equal(counts.emitted, new)
    assert (counts.accepted <= counts.tested).all() and (counts.impossible == 0).all()
    assert counts.rounds[5] == 0 and counts.drafted[5] == 0
    assert counts.verified_at.sum() == counts.verified.sum()
    assert counts.accepted_at.sum() == counts.accepted.sum()
    assert (counts.accepted_at <= counts.observed_at).all()
    if rule == "standard":
        assert (counts.emitted == counts.accepted + counts.rounds).all()
    if policy.name == "nothing" and rule != "standard":
        assert counts.verified.sum() == 0 and counts.observed_at[0] > 0  # position 1 is graded for nothing


@pytest.mark.parametrize("rule", ["standard", "coupled", "deferred"])
def test_eos_ends_a_request_inside_an_accepted_prefix(rule):
    # The target counts 0 1 2 ... cyclically, and so does the draft: everything is accepted; token 3 is EOS.
    size = 6
    table = np.full((size, size), -np.inf)
    table[np.arange(size), (np.arange(size) + 1) % size] = 0.0
    loop = decoder(
        bigram_model(jnp.asarray(table, jnp.float32)),
        autoregressive_drafter(bigram_model(jnp.asarray(table, jnp.float32)), 5),
        num_draft_tokens=5,
        max_new_tokens=9,
        rule=rule,
        eos_token=3,
    )
    prompts = jnp.asarray([[0, 0], [4, 0], [3, 2]])
    state = jax.jit(lambda k: loop.run(loop.init(k, prompts, jnp.asarray([1, 1, 2]), (), ())))(jax.random.key(0))
    expected = [[0, 1, 2, 3], [4, 5, 0, 1, 2, 3], [3, 2, 3]]
    for row, wanted in zip(np.asarray(state.tokens), expected, strict=True):
        assert row[: len(wanted)].tolist() == wanted and (row[len(wanted) :] == -1).all()
    assert state.finished.all()
    # Labels beyond EOS are ignored: 3, 5 and 1 drafts are labelled.
    assert int(state.statistics.observed_at.sum()) == int(state.statistics.accepted_at.sum()) == 3 + 5 + 1


def test_max_rounds_stops_and_the_run_can_be_resumed():
    target = bigram(30, 5)
    loop = decoder(
        bigram_model(jnp.asarray(target, jnp.float32)),
        drafters(bigram(31, 5))["autoregressive"],
        num_draft_tokens=WIDTH,
        max_new_tokens=20,
        estimator=estimators.online_logistic(WIDTH),
    )
    prompts, ones = jnp.zeros((3, 1), jnp.int32), jnp.ones((3,), jnp.int32)
    state = loop.init(jax.random.key(0), prompts, ones, (), ())
    whole = jax.jit(loop.run)(state)
    part = jax.jit(functools.partial(loop.run, max_rounds=2))(state)
    assert (part.statistics.rounds == 2).all()
    for a, b in zip(jax.tree.leaves(jax.jit(loop.run)(part)), jax.tree.leaves(whole), strict=True):
        if not jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(a, b)


# ------------------------------------------------------------------------------------------------- as a component


@pytest.mark.parametrize("pair", ["coupled, trimmer", "deferred, eager"])
def test_the_loop_compiles_once_stays_on_the_device_and_runs_under_scan(pair):
    rule, refill, policy, estimator = pairs()[pair]
    loop = decoder(
        bigram_model(jnp.asarray(bigram(1), jnp.float32)),
        drafters(bigram(2))["autoregressive"],
        num_draft_tokens=WIDTH,
        max_new_tokens=8,
        policy=policy,
        estimator=estimator,
        rule=rule,
        refill=refill,
    )

    def run(key, prompts, lengths, limits):
        return loop.run(loop.init(key, prompts, lengths, (), (), token_limits=limits)).tokens

    jitted, traces = count_traces(run)
    prompts = jnp.zeros((3, 5), jnp.int32)
    for i in range(20):
        jitted(jax.random.key(i), prompts, jnp.asarray([1, 2, 1 + i % 5]), jnp.asarray([i % 9, 8, 3]))
    assert len(traces) == 1
    arguments = (jax.random.key(0), prompts, jnp.asarray([1, 2, 3]), jnp.asarray([8, 8, 8]))
    assert_stays_on_device(run, *arguments)
    # Fixed rounds under scan give the same tokens as the while loop.
    state = loop.init(*arguments[:3], (), ())
    scanned = jax.jit(lambda s: jax.lax.scan(lambda c, _: (loop.step(c)[0], None), s, length=12)[0])(state)
    np.testing.assert_array_equal(scanned.tokens, run(*arguments))


def test_the_convenience_function_decodes():
    state = speculative_decode(
        jax.random.key(0),
        jnp.zeros((2, 1), jnp.int32),
        jnp.ones((2,), jnp.int32),
        bigram_model(jnp.asarray(bigram(1), jnp.float32)),
        (),
        drafters(bigram(2))["autoregressive"],
        (),
        num_draft_tokens=WIDTH,
        max_new_tokens=5,
    )
    assert (state.positions == 6).all()


def test_bad_configurations_are_refused(own_checks):
    model = bigram_model(jnp.zeros((3, 3)))
    drafter = autoregressive_drafter(model, 2)
    build = functools.partial(decoder, model, drafter, max_new_tokens=3)
    with pytest.raises(ValueError, match="rule: expected one of 'standard', 'coupled', 'deferred', got 'magic'"):
        build(num_draft_tokens=2, rule="magic")
    with pytest.raises(ValueError, match="num_draft_tokens: expected an int of at least 1, got 0"):
        build(num_draft_tokens=0)
    with pytest.raises(TypeError, match="num_draft_tokens: expected a Python int"):
        build(num_draft_tokens=2.0)
    with pytest.raises(ValueError, match="refill: expected one of"):
        build(num_draft_tokens=2, refill="never")
    loop = build(num_draft_tokens=2)
    with pytest.raises(ValueError, match=r"prompt_lengths: expected shape \[B=2\], got \[3\]"):
        loop.init(jax.random.key(0), jnp.zeros((2, 1), jnp.int32), jnp.ones((3,), jnp.int32), (), ())
    with pytest.raises(TypeError, match="prompts: expected an integer dtype"):
        loop.init(jax.random.key(0), jnp.zeros((2, 1)), jnp.ones((2,), jnp.int32), (), ())
