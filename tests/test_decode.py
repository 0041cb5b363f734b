"""The decoding loop: the target's law, greedy continuation, bitwise deferral, limits and EOS, one compilation."""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specav import estimators, policies
from specav.costs import cost_table
from specav.decode import decoder, speculative_decode
from specav.drafting import autoregressive_drafter, parallel_drafter, point_mass_drafter
from specav.features import feature_class
from specav.sampling import SamplingParams
from tests.helpers import assert_stays_on_device, bigram_model, choice
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


def drafter_of(kind, table):
    """A drafter over a bigram table, which may be traced."""
    table = jnp.asarray(table, jnp.float32)

    def last(context):
        return jnp.take_along_axis(context.tokens, context.lengths[:, None] - 1, axis=1)[:, 0]

    def laws(state, context):  # every position from the last committed token: no draw is needed
        return jnp.broadcast_to(table[last(context)][:, None], (len(context.lengths), WIDTH, len(table))), state

    def guess(state, context):
        token, guesses = last(context), []
        for _ in range(WIDTH):
            token = jnp.argmax(table[token], axis=-1).astype(jnp.int32)
            guesses.append(token)
        return jnp.stack(guesses, axis=1), state

    if kind == "autoregressive":
        return autoregressive_drafter(bigram_model(table), WIDTH)
    return parallel_drafter(no_prefill, laws, WIDTH) if kind == "parallel" else point_mass_drafter(no_prefill, guess)


COSTS = cost_table(np.arange(1, 9), np.asarray([1.0, 1.0, 1.1, 1.5, 1.5, 2.0, 2.4, 3.0]))
LEAK = policies.threshold("logit_q_sampled", 0.0)
DRAWN = ("logit_q_sampled", "entropy")

# (rule, refill) -> the estimator's features, and policies, all lossless but the leak. Each line is compiled once.
LOOPS = {
    ("standard", "block"): (
        ("logit_q_max",),
        {
            "everything": policies.everything(),
            "fixed": policies.fixed(1),
            "max q": policies.threshold("logit_q_max", 0.2),
            "trimmer": policies.trimmer(COSTS),
            "leak": LEAK,
        },
    ),
    ("coupled", "block"): (
        DRAWN,
        {"nothing": policies.nothing(), "drawn q": LEAK, "trimmer": policies.trimmer(COSTS)},
    ),
    ("deferred", "block"): (DRAWN, {"live budget": policies.live_argmax(COSTS)}),
    ("deferred", "eager"): (DRAWN, {"drawn q": policies.threshold("logit_q_sampled", 0.3)}),
}
PAIRS = [(*loop, name) for loop, (_, choices) in LOOPS.items() for name in choices if name != "leak"]
NUMBER = 100_000


@functools.cache
def law_loop(rule, refill, kind):
    """Decodes NUMBER requests from token 0; tables, policy and temperatures are arguments."""
    features, choices = LOOPS[rule, refill]
    # Other drafters than the autoregressive one: without an estimator.
    plain = kind != "autoregressive"
    policy = policies.fixed(1) if plain else choice(choices.values())

    @jax.jit
    def run(key, target_table, draft_table, index, temperature):
        loop = decoder(
            bigram_model(target_table),
            drafter_of(kind, draft_table),
            num_draft_tokens=WIDTH,
            max_new_tokens=LENGTH,
            policy=policy,
            estimator=None if plain else estimators.online_logistic(WIDTH, features, refit_interval=1),
            rule=rule,
            refill=refill,
            sampling=SamplingParams(temperature),
            draft_sampling=SamplingParams(),
            require_lossless=plain or rule == "deferred",  # a choice declares too much for the others
        )
        state = loop.init(key, jnp.zeros((NUMBER, 1), jnp.int32), jnp.ones((NUMBER,), jnp.int32), (), ())
        state = state if plain else state._replace(policy=(index, state.policy[1]))
        state = loop.run(state)
        return state.tokens[:, 1:], state.positions, state.finished

    return run


def decode_tokens(target, draft, rule, refill="block", name=None, *, kind="autoregressive", num_greedy=0):
    """int [NUMBER, LENGTH] tokens decoded over the two tables, the first `num_greedy` requests greedily."""
    tables = [jnp.asarray(table, jnp.float32) for table in (target, draft)]
    index = jnp.asarray(0 if name is None else list(LOOPS[rule, refill][1]).index(name), jnp.int32)
    temperature = np.where(np.arange(NUMBER) < num_greedy, np.float32(0), np.float32(1))
    tokens, positions, finished = law_loop(rule, refill, kind)(jax.random.key(0), *tables, index, temperature)
    assert (np.asarray(positions) == 1 + LENGTH).all() and np.asarray(finished).all()
    return np.asarray(tokens)


@pytest.mark.parametrize(("rule", "refill", "name"), PAIRS)
def test_decoded_sequences_follow_the_target_law_and_greedy_ones_its_maximum(rule, refill, name):
    features, choices = LOOPS[rule, refill]
    policies.require_lossless(choices[name], rule, acceptance_depends_on=feature_class(features))
    target, draft, greedy = bigram(1), bigram(2), 500
    tokens = decode_tokens(target, draft, rule, refill, name, num_greedy=greedy)
    test = chi_square(sequence_counts(tokens[greedy:]), sequence_law(target, 0))
    assert test.passed and test.detectable_tv < 0.025, test
    expected, token = [], 0
    for _ in range(LENGTH):
        token = int(np.argmax(target[token]))
        expected.append(token)
    assert (tokens[:greedy] == np.asarray(expected)).all()


# The deferred rule is the coupled one with `carry_over`.
@pytest.mark.parametrize("kind", ["parallel", "point_mass"])
@pytest.mark.parametrize("rule", ["standard", pytest.param("coupled", marks=pytest.mark.slow), "deferred"])
def test_every_kind_of_drafter_is_lossless(kind, rule):
    target, draft = bigram(3), bigram(4)
    tokens = decode_tokens(target, draft, rule, kind=kind)
    assert chi_square(sequence_counts(tokens), sequence_law(target, 0)).passed


def test_a_target_that_is_off_by_two_percent_is_seen():
    target, draft = bigram(1), bigram(2)
    row = np.exp(target[0]) / np.exp(target[0]).sum()
    wrong = target.copy()
    wrong[0] = np.log(at_total_variation(row, 0.02))
    tokens = decode_tokens(wrong, draft, "coupled", name="trimmer")
    assert not chi_square(sequence_counts(tokens), sequence_law(target, 0)).passed


def test_a_leaking_policy_is_refused_and_bends_the_law():
    # Uniform target, draft (.1, .1, .8), discard when q(drawn) < .5: P(C) = .2 / 3 + .8 * (1/3) / .8 = .4.
    target, draft = np.zeros((3, 3)), np.log(np.tile([0.1, 0.1, 0.8], (3, 1)))
    with pytest.raises(ValueError, match=r"logit_q_sampled.*standard"):
        decoder(
            bigram_model(target.astype(np.float32)),
            drafter_of("autoregressive", draft),
            num_draft_tokens=WIDTH,
            max_new_tokens=LENGTH,
            policy=LEAK,
            rule="standard",
        )
    counts = np.bincount(decode_tokens(target, draft, "standard", name="leak")[:, 0], minlength=3)
    assert chi_square(counts, [0.3, 0.3, 0.4]).passed
    assert not chi_square(counts, [1 / 3] * 3).passed


# --------------------------------------------------------------------------------- bitwise equality, batch-mates


def random_policy(seed):
    """Verifies a random number of drafts, looking at everything."""

    def decide(state, inputs):
        key, sub = jax.random.split(state)
        n = jax.random.randint(sub, inputs.num_drafts.shape, 0, inputs.num_drafts + 1)
        return jnp.where(inputs.draft_tokens[:, -1] % 2 == 0, n, inputs.num_drafts // 2), key

    return policies.everything()._replace(init=lambda: jax.random.key(seed), decide=decide, window="block")


LONG = {
    "everything": policies.everything(),
    "nothing": policies.nothing(),
    "fixed": policies.fixed(1),
    "random": random_policy(0),
    "live": policies.live_argmax(COSTS),
    "trimmer": policies.trimmer(COSTS),
}
NEW_TOKENS = np.asarray([64, 10, 64, 33, 1, 0], np.int32)
PROMPT_LENGTHS = np.asarray([1, 2, 3, 4, 4, 1], np.int32)
EOS = 12  # neither model ever emits it from the ordinary tables
FOREVER = 10_000
TRACES = []  # one entry for every trace of a long loop


class LongLoop(NamedTuple):
    """A loop over two tables of 13 tokens with K = 5, compiled once per batch size."""

    init: Callable
    step: Callable
    run: Callable


@functools.cache
def long_loop(rule, refill):
    def build(tables):
        target, draft = tables
        return decoder(
            bigram_model(target),
            autoregressive_drafter(bigram_model(draft), 5),
            num_draft_tokens=5,
            max_new_tokens=64,
            policy=choice(LONG.values()),
            estimator=estimators.online_logistic(5),
            rule=rule,
            refill=refill,
            eos_token=EOS,
            require_lossless=False,
        )

    def init(tables, keys, prompts, lengths, limits, index):
        state = build(tables).init(keys, prompts, lengths, (), (), token_limits=limits)
        return state._replace(policy=(index, state.policy[1]))

    def run(tables, state, max_rounds):
        TRACES.append((rule, refill))
        return build(tables).run(state, max_rounds=max_rounds)

    return LongLoop(jax.jit(init), lambda tables, state: build(tables).step(state)[0], jax.jit(run))


def ordinary_tables():
    """Target and draft that resemble each other; token EOS is out of reach."""
    target, draft = bigram(20, 12), bigram(21, 12) * 0.5 + bigram(20, 12)
    return [np.pad(t, (0, 1), constant_values=-np.inf).astype(np.float32) for t in (target, draft)]


def long_start(policy, rule, refill="block", rows=range(6), limits=NEW_TOKENS):
    """6 requests of different lengths and limits."""
    rows = np.asarray(rows)
    keys = jax.random.split(jax.random.key(5), 6)[rows]
    prompts = np.random.default_rng(6).integers(0, 12, (6, 4), np.int32)[rows]
    index = jnp.asarray(list(LONG).index(policy), jnp.int32)
    arguments = (keys, prompts, PROMPT_LENGTHS[rows], np.asarray(limits)[rows], index)
    return long_loop(rule, refill).init(ordinary_tables(), *arguments)


def go_on(state, rule, refill="block", rounds=FOREVER, tables=None):
    """The state after so many rounds more."""
    tables = ordinary_tables() if tables is None else tables
    return long_loop(rule, refill).run(tables, state, jnp.asarray(rounds, jnp.int32))


@functools.cache
def long_run(policy, rule="deferred", refill="block", rows=tuple(range(6)), limits=tuple(NEW_TOKENS)):
    """Up to 64 new tokens: tokens and statistics."""
    state = go_on(long_start(policy, rule, refill, rows, limits), rule, refill)
    return jax.tree.map(np.asarray, (state.tokens, state.positions, state.statistics))


@pytest.mark.parametrize("policy", ["random", "nothing", "live"])
def test_deferred_decoding_is_bitwise_that_of_verifying_everything(policy):
    (tokens, _, all_counts), (trimmed, _, counts) = long_run("everything"), long_run(policy)
    np.testing.assert_array_equal(trimmed, tokens)
    assert counts.verified.sum() < all_counts.verified.sum()
    # A block is drawn once, whatever is trimmed: nothing is redrafted.
    np.testing.assert_array_equal(counts.drafted, all_counts.drafted)


def test_eager_refill_is_not_bitwise_but_drafts_more_often():
    block, eager = long_run("nothing")[2], long_run("nothing", refill="eager")[2]
    assert eager.rounds.sum() <= block.rounds.sum()


@pytest.mark.parametrize("rule", ["standard", "coupled", "deferred"])
def test_tokens_do_not_change_with_batch_mates_or_their_order(rule):
    whole = long_run("fixed", rule)[0]
    order = (3, 0, 5, 1, 4, 2)
    np.testing.assert_array_equal(long_run("fixed", rule, rows=order)[0], whole[list(order)])
    only = tuple(np.where(np.arange(6) == 2, NEW_TOKENS, 0))  # the others are finished before they begin
    np.testing.assert_array_equal(long_run("fixed", rule, limits=only)[0][2], whole[2])
    if rule == "coupled":  # a batch of one is another program
        np.testing.assert_array_equal(long_run("fixed", rule, rows=(2,))[0], whole[2:3])


# ------------------------------------------------------------------------------------------- limits, EOS, counts


@pytest.mark.parametrize("rule", ["standard", "coupled", "deferred"])
@pytest.mark.parametrize("policy", ["everything", "nothing", "fixed"])
def test_limits_lengths_and_counts(rule, policy):
    tokens, positions, counts = long_run(policy, rule)
    lengths, new = PROMPT_LENGTHS, NEW_TOKENS
    np.testing.assert_array_equal(positions, lengths + new)
    for b in range(6):
        assert (tokens[b, : lengths[b] + new[b]] >= 0).all() and (tokens[b, lengths[b] + new[b] :] == -1).all()
    np.testing.assert_array_equal(counts.emitted, new)
    assert (counts.accepted <= counts.tested).all() and (counts.impossible == 0).all()
    assert counts.rounds[5] == 0 and counts.drafted[5] == 0
    assert counts.verified_at.sum() == counts.verified.sum()
    assert counts.accepted_at.sum() == counts.accepted.sum()
    assert (counts.accepted_at <= counts.observed_at).all()
    if rule == "standard":
        assert (counts.emitted == counts.accepted + counts.rounds).all()
    if policy == "nothing" and rule != "standard":
        assert counts.verified.sum() == 0 and counts.observed_at[0] > 0  # position 1 is graded for nothing


@pytest.mark.parametrize("rule", ["standard", "coupled", "deferred"])
def test_eos_ends_a_request_inside_an_accepted_prefix(rule):
    # The target counts 9 10 11 12 0 1 ... cyclically, and so does the draft: all is accepted; token 12 is EOS.
    table = np.full((13, 13), -np.inf, np.float32)
    table[np.arange(13), (np.arange(13) + 1) % 13] = 0.0
    prompts = np.zeros((6, 4), np.int32)
    prompts[:, 0], prompts[2, 1] = [9, 7, 12, 0, 0, 0], 11  # EOS in the prompt ends nothing
    lengths, limits = np.asarray([1, 1, 2, 1, 1, 1], np.int32), np.asarray([9, 9, 9, 0, 0, 0], np.int32)
    index, keys = jnp.zeros((), jnp.int32), jax.random.split(jax.random.key(0), 6)
    state = long_loop(rule, "block").init([table, table], keys, prompts, lengths, limits, index)
    state = go_on(state, rule, tables=[table, table])
    expected = [[9, 10, 11, 12], [7, 8, 9, 10, 11, 12], [12, 11, 12]]
    for row, wanted in zip(np.asarray(state.tokens), expected, strict=False):
        assert row[: len(wanted)].tolist() == wanted and (row[len(wanted) :] == -1).all()
    assert np.asarray(state.finished).all()
    # Labels beyond EOS are ignored: 3, 5 and 1 drafts are labelled.
    counts = jax.tree.map(np.asarray, state.statistics)
    assert int(counts.observed_at.sum()) == int(counts.accepted_at.sum()) == 3 + 5 + 1


def test_max_rounds_stops_and_the_run_can_be_resumed():
    start = long_start("trimmer", "coupled")
    whole, part = go_on(start, "coupled"), go_on(start, "coupled", rounds=1)
    assert (np.asarray(part.statistics.rounds) == (NEW_TOKENS > 0)).all()
    for a, b in zip(jax.tree.leaves(go_on(part, "coupled")), jax.tree.leaves(whole), strict=True):
        if not jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(a, b)


# ------------------------------------------------------------------------------------------------- as a component


@pytest.mark.parametrize(("rule", "refill", "policy"), [("coupled", "block", "trimmer"), ("deferred", "eager", "live")])
def test_the_loop_compiles_once_stays_on_the_device_and_runs_under_scan(rule, refill, policy):
    long_run(policy, rule, refill)
    before = len(TRACES)
    for i in range(20):
        limits = (i % 9, 8, 3, 64 - i, 0, 5)
        long_run(list(LONG)[i % len(LONG)], rule, refill, limits=limits)
    assert len(TRACES) == before
    state, tables = long_start(policy, rule, refill), ordinary_tables()
    assert_stays_on_device(long_loop(rule, refill).run, tables, state, jnp.asarray(3, jnp.int32))
    if rule == "deferred":  # fixed rounds under scan give the same tokens as the while loop
        step = long_loop(rule, refill).step
        scanned = jax.jit(lambda t, s: jax.lax.scan(lambda c, _: (step(t, c), None), s, length=70)[0].tokens)
        np.testing.assert_array_equal(scanned(tables, state), long_run(policy, rule, refill)[0])


def test_the_convenience_function_decodes():
    target, draft = ordinary_tables()
    limits = np.asarray([5, 2], np.int32)

    @jax.jit
    def decode(keys):
        return speculative_decode(
            keys,
            jnp.zeros((2, 1), jnp.int32),
            jnp.ones((2,), jnp.int32),
            bigram_model(target),
            (),
            autoregressive_drafter(bigram_model(draft), WIDTH),
            (),
            token_limits=jnp.asarray(limits),
            num_draft_tokens=WIDTH,
            max_new_tokens=5,
        )

    state = decode(jax.random.split(jax.random.key(0), 2))
    assert np.asarray(state.positions).tolist() == [6, 3]


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
