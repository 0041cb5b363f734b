"""Verification: structure on arbitrary inputs, emitted laws by chi-square, keys, the deferred rule, bad input."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from specav.randomness import draft_keys, request_keys
from specav.sampling import SamplingParams, law, process_logits, sample
from specav.verification import DraftBlock, acceptance_probabilities, carry_over, speculative_verify
from tests.helpers import assert_stays_on_device
from tests.laws import LawTest, at_total_variation, chi_square

HARD = st.sampled_from([-np.inf, np.nan, np.inf, -88.0, -3.0, 0.0, 0.5, 2.0, 60.0])


# Compilation is most of this module's time: one jitted function, and few shapes.
BATCH, WIDTH, SIZE = 4, 4, 5
TRACES = []


@functools.partial(jax.jit, static_argnames="rule")
def verify(key, tokens, draft, target, num_drafts, num_verified, positions, rule):
    TRACES.append(rule)
    return speculative_verify(key, tokens, draft, target, num_drafts, num_verified, rule=rule, positions=positions)


acceptances = jax.jit(acceptance_probabilities)
laws = jax.jit(law)
carry = jax.jit(carry_over)


# ---------------------------------------------------------------------------------------------------- structure


# Few static variants, each compiled once per rule: [batch, width, vocabulary], dtype, point-mass drafts.
VARIANTS = [
    ((BATCH, WIDTH, SIZE), jnp.float32, False),
    ((BATCH, WIDTH, SIZE), jnp.bfloat16, False),
    ((BATCH, WIDTH, SIZE), jnp.float32, True),
    ((1, 1, 1), jnp.float32, False),
]


@st.composite
def rounds(draw, variants=VARIANTS):
    """A round with hard logits and ragged, possibly senseless, counts; NumPy arrays."""
    (batch, width, vocabulary), dtype, point_mass = draw(st.sampled_from(variants))
    draft = draw(hnp.arrays(np.float32, (batch, width, vocabulary), elements=HARD))
    target = draw(hnp.arrays(np.float32, (batch, width + 1, vocabulary), elements=HARD))
    counts = hnp.arrays(np.int32, (batch,), elements=st.integers(-2, width + 2))
    return (
        raw_keys(draw(st.integers(0, 999)), batch),
        draw(hnp.arrays(np.int32, (batch, width), elements=st.integers(-1, vocabulary))),
        None if point_mass else draft.astype(dtype),
        target.astype(dtype),
        draw(counts),
        draw(counts),
        draw(hnp.arrays(np.int32, (batch,), elements=st.integers(0, 1000))),
    )


def raw_keys(seed, batch=BATCH):
    """Distinct keys [batch], in the old form."""
    return np.random.default_rng(seed).integers(0, 2**32, (batch, 2), np.uint32)


def assert_same(left, right):
    for one, two in zip(left, right, strict=True):
        np.testing.assert_array_equal(one, two)


@given(rounds(), st.sampled_from(["standard", "coupled"]))
def test_the_output_is_a_prefix_of_the_drafts_plus_at_most_one_token(inputs, rule):
    _, tokens, draft, target, num_drafts, num_verified, _ = inputs
    result = jax.tree.map(np.asarray, verify(*inputs, rule=rule))
    width = tokens.shape[1]
    possible = np.asarray(laws(target))
    for b in range(tokens.shape[0]):
        drafts = int(np.clip(num_drafts[b], 0, width))
        verified = int(np.clip(num_verified[b], 0, drafts))
        tested, accepted, emitted = (int(x[b]) for x in (result.num_tested, result.num_accepted, result.num_emitted))
        assert tested == (verified if rule == "standard" else min(verified + 1, drafts))
        assert 0 <= accepted <= tested
        free_row_accepted = rule == "coupled" and verified < drafts and accepted == tested
        assert emitted == accepted + (not free_row_accepted)
        assert emitted >= 1
        row = result.tokens[b]
        assert row[:accepted].tolist() == tokens[b, :accepted].tolist()
        assert (row[emitted:] == -1).all() and (row[:emitted] >= 0).all()
        # Nothing the target excludes is ever emitted; a row without any token emits token 0.
        for i in range(emitted):
            assert possible[b, i, row[i]] > 0 or (not possible[b, i].any() and row[i] == 0)
    if draft is not None:
        impossible = np.asarray(acceptances(tokens, draft, target, num_drafts).impossible)
        assert not any(impossible[b, i] for b in range(tokens.shape[0]) for i in range(result.num_accepted[b]))


@given(rounds(), st.sampled_from(["standard", "coupled"]), st.randoms(use_true_random=False))
def test_permuting_requests_permutes_results(inputs, rule, random):
    order = list(range(inputs[1].shape[0]))
    random.shuffle(order)
    permuted = [None if x is None else x[order] for x in inputs]
    straight, shuffled = verify(*inputs, rule=rule), verify(*permuted, rule=rule)
    assert_same([np.asarray(before)[order] for before in straight], shuffled)


@given(rounds(), st.sampled_from(["standard", "coupled"]))
def test_rows_that_were_not_fed_do_not_matter(inputs, rule):
    keys, tokens, draft, target, num_drafts, num_verified, positions = inputs
    fed = np.arange(target.shape[1]) <= np.clip(num_verified, 0, np.clip(num_drafts, 0, 99))[:, None]
    other = np.where(fed[:, :, None], target, np.asarray(7.0, target.dtype))
    after = verify(keys, tokens, draft, other, num_drafts, num_verified, positions, rule=rule)
    assert_same(verify(*inputs, rule=rule), after)


@given(rounds())
def test_acceptance_probabilities_are_probabilities(inputs):
    _, tokens, draft, target, num_drafts, *_ = inputs
    result = jax.tree.map(np.asarray, acceptances(tokens, draft, target, num_drafts))
    for values in (result.token, result.prefix):
        assert ((values >= 0) & (values <= 1)).all()
    beyond = np.arange(tokens.shape[1])[None, :] >= np.asarray(num_drafts)[:, None]
    assert not result.token[beyond].any() and not result.impossible[beyond].any()


# With the two tests below, the laws of float32 rounds (next section) are those of bfloat16 and of point masses too.


@given(rounds(VARIANTS[1:2]), st.sampled_from(["standard", "coupled"]))
def test_half_precision_logits_act_as_their_float32_values(inputs, rule):
    keys, tokens, draft, target, *counts = inputs
    same = verify(keys, tokens, draft.astype(np.float32), target.astype(np.float32), *counts, rule=rule)
    assert_same(verify(*inputs, rule=rule), same)


@given(rounds(VARIANTS[2:3]), st.sampled_from(["standard", "coupled"]))
def test_point_mass_drafts_act_as_one_hot_logits(inputs, rule):
    keys, tokens, _, *rest = inputs
    one_hot = np.where(tokens[:, :, None] == np.arange(SIZE), np.float32(0), np.float32(-np.inf))
    assert_same(verify(*inputs, rule=rule), verify(keys, tokens, one_hot, *rest, rule=rule))


def test_equal_laws_accept_everything():
    rng = np.random.default_rng(0)
    full = np.full((BATCH,), WIDTH, np.int32)
    for seed in range(15):
        logits = rng.normal(size=(BATCH, WIDTH + 1, SIZE)).astype(np.float32) * 3
        tokens = rng.integers(0, SIZE, (BATCH, WIDTH), np.int32)
        result = verify(raw_keys(seed), tokens, logits[:, :WIDTH], logits, full, full, full, rule="standard")
        assert (np.asarray(result.num_accepted) == WIDTH).all() and (np.asarray(result.num_emitted) == WIDTH + 1).all()


def test_a_vanishing_residual_draws_from_the_target():
    # In float32 max(p - q, 0) is zero everywhere although the draft is rejected: q(x) = 0 for the drafted token.
    row = np.asarray([0, 0, -np.inf, -np.inf, -np.inf], np.float32)
    target = np.broadcast_to(row, (BATCH, WIDTH + 1, SIZE))
    tokens, one = np.full((BATCH, WIDTH), 2, np.int32), np.ones((BATCH,), np.int32)
    result = verify(raw_keys(0), tokens, target[:, :WIDTH], target, one, one, one, rule="standard")
    assert not np.asarray(result.num_accepted).any() and set(np.asarray(result.tokens[:, 0]).tolist()) <= {0, 1}


# ---------------------------------------------------------------------------------------------------------- laws

NUMBER = 200_000


def emit(tables, rule, num_drafts, num_verified, *, seed=0, temperature=None):
    """One round of NUMBER requests over bigram-like tables; returns emitted tokens and counts.

    tables: (q1 [V], q2 [V, V], p1 [V], p2 [V, V], p3 [V, V]) logits; rows of the second and third position are chosen
    by the draft before. Drafts are drawn with the library's keys. V = 4: one program draws, one verifies per rule.
    """
    temperature = np.ones(NUMBER) if temperature is None else temperature
    logits = [np.asarray(table, np.float32) for table in tables]
    keys, drafts, draft, target = drafted(jax.random.key(seed), logits, temperature.astype(np.float32))
    zero = np.zeros((NUMBER,), np.int32)
    return jax.tree.map(
        np.asarray, verify(keys, drafts, draft, target, zero + num_drafts, zero + num_verified, zero, rule=rule)
    )


@jax.jit
def drafted(key, tables, temperature):
    q1, q2, p1, p2, p3 = tables
    keys = request_keys(key, NUMBER)
    zero = jnp.zeros((NUMBER,), jnp.int32)
    row1 = jnp.broadcast_to(q1, (NUMBER, *q1.shape))
    x1 = sample(draft_keys(keys, zero, zero), row1)
    x2 = sample(draft_keys(keys, zero + 1, zero), q2[x1])
    target = jnp.stack([jnp.broadcast_to(p1, row1.shape), p2[x1], p3[x2]], axis=1)
    target = process_logits(target, SamplingParams(temperature))
    return keys, jnp.stack([x1, x2], axis=1), jnp.stack([row1, q2[x1]], axis=1), target


def tables(seed, size=4, scale=1.2):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape) * scale for shape in ((size,), (size, size), (size,), (size, size), (size, size))]


def probabilities(logits):
    """float64 softmax of the logits as the device sees them."""
    z = np.asarray(logits, np.float32).astype(np.float64)
    weights = np.exp(z - z.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def check_laws(result, p1, p2, p3):
    """First token ~ p1; given an accepted first draft, the second ~ p2(. | first); likewise the third."""
    size = len(p1)
    tests = [chi_square(np.bincount(result.tokens[:, 0], minlength=size), p1)]
    one = result.num_accepted >= 1
    two = result.num_accepted >= 2
    for first in range(size):
        second = result.tokens[one & (result.num_emitted >= 2) & (result.tokens[:, 0] == first), 1]
        third = result.tokens[two & (result.num_emitted >= 3) & (result.tokens[:, 1] == first), 2]
        for drawn, row in ((second, p2[first]), (third, p3[first])):
            if len(drawn) > 20_000:
                tests.append(chi_square(np.bincount(drawn, minlength=size), row))
    return tests


@pytest.mark.parametrize("rule", ["standard", "coupled"])
@pytest.mark.parametrize(("num_drafts", "num_verified"), [(2, 2), (2, 1), (2, 0), (1, 1), (0, 0)])
def test_emitted_laws(rule, num_drafts, num_verified):
    logits = tables(num_drafts * 3 + num_verified)
    result = emit(logits, rule, num_drafts, num_verified, seed=num_verified)
    tests = check_laws(result, *(probabilities(t) for t in logits[2:]))
    assert all(test.passed for test in tests), tests
    assert tests[0].detectable_tv < 0.02


@pytest.mark.parametrize("rule", ["standard", "coupled"])
def test_a_fault_of_tv_two_percent_is_seen(rule):
    logits = tables(5)
    faulty = list(logits)
    law1 = probabilities(logits[2])
    faulty[2] = np.log(at_total_variation(law1, 0.02))
    result = emit(faulty, rule, 2, 1)
    test: LawTest = check_laws(result, law1, *(probabilities(t) for t in logits[3:]))[0]
    assert not test.passed


def certain(tokens, size=4):
    """Logits of the point masses on these tokens."""
    with np.errstate(divide="ignore"):
        return np.log(np.eye(size)[tokens])


@pytest.mark.parametrize("rule", ["standard", "coupled"])
def test_emitted_laws_of_point_mass_drafts(rule):
    logits = tables(12)
    logits[0], logits[1] = certain(1), certain((np.arange(4) + 1) % 4)
    result = emit(logits, rule, 2, 1)
    assert all(t.passed for t in check_laws(result, *(probabilities(t) for t in logits[2:])))


def test_emitted_laws_when_the_draft_excludes_tokens():
    logits = tables(13)
    logits[0][2] = -np.inf
    logits[1][:, 0] = -np.inf
    logits[3][:, 1] = -np.inf
    result = emit(logits, "coupled", 2, 2)
    assert all(t.passed for t in check_laws(result, *(probabilities(t) for t in logits[2:])))


@pytest.mark.parametrize(("mass", "repeats"), [(1.0, 1), (0.1, 1), (1e-2, 2), (1e-3, 5), (1e-4, 10)])
def test_residual_tokens_follow_the_residual_law(mass, repeats):
    # p = (1 - mass) q + mass r, with q and r on disjoint tokens: a rejection must draw from r.
    q, r = np.asarray([1.0, 0, 0, 0]), np.asarray([0, 0.2, 0.3, 0.5])
    with np.errstate(divide="ignore"):
        logits = [np.log(q), np.log(np.tile(q, (4, 1))), np.log((1 - mass) * q + mass * r), *tables(0)[3:]]
    hits = np.zeros(4, np.int64)
    for seed in range(repeats):
        result = emit(logits, "standard", 1, 1, seed=seed)
        hits += np.bincount(result.tokens[result.num_accepted == 0, 0], minlength=4)
    number = repeats * NUMBER
    assert hits[0] == 0
    assert chi_square([hits.sum(), number - hits.sum()], [mass, 1 - mass]).passed
    assert chi_square(hits[1:], r[1:]).passed


def test_rare_tokens_keep_their_mass_through_verification():
    # 1,000 tokens of probability 1e-7 that the draft never proposes: they can come from the residual only.
    size, batch, number = 1001, 1_000, 1_100_000
    target_row = jnp.log(jnp.full((size,), 1e-7).at[500].set(1.0))
    draft_row = jnp.full((size,), -jnp.inf).at[500].set(0.0)

    def some(count, key):  # few requests at a time stay in the cache
        full = jnp.ones((batch,), jnp.int32)
        result = speculative_verify(
            jax.random.split(key, batch),
            jnp.full((batch, 1), 500),
            jnp.broadcast_to(draft_row, (batch, 1, size)),
            jnp.broadcast_to(target_row, (batch, 2, size)),
            full,
            full,
            rule="standard",
            positions=full,
        )
        return count + jnp.sum(result.tokens[:, 0] != 500), None

    hits = jax.jit(lambda key: jax.lax.scan(some, 0, jax.random.split(key, number // batch))[0])
    count = int(hits(jax.random.key(0)))
    test = chi_square([count, number - count], [1e-4 / (1 + 1e-4), 1 / (1 + 1e-4)])
    assert test.passed


def test_greedy_and_sampled_rows_share_a_batch():
    logits = tables(4)
    temperature = np.arange(NUMBER) % 2
    emitted = emit(logits, "coupled", 2, 1, temperature=temperature).tokens[:, 0]
    assert (emitted[::2] == int(np.argmax(logits[2]))).all()
    assert chi_square(np.bincount(emitted[1::2], minlength=4), probabilities(logits[2])).passed


# ------------------------------------------------------------------------------------------------------ deferred


@jax.jit
def draw_block(keys, draft, start):
    """Drafts int32 [BATCH, WIDTH] from their laws, at positions start.. on."""
    keys = request_keys(keys, BATCH)
    columns = [sample(draft_keys(keys, start + i, start), draft[:, i]) for i in range(WIDTH)]
    return jnp.stack(columns, axis=1)


@settings(max_examples=15)
@given(st.integers(0, 10_000), st.data())
def test_deferred_blocks_emit_bitwise_what_verifying_everything_emits(seed, data):
    batch, width, size = BATCH, WIDTH, SIZE
    rng = np.random.default_rng(seed)
    draft = rng.normal(size=(batch, width, size)).astype(np.float32)
    target = rng.normal(size=(batch, width + 1, size)).astype(np.float32) + 0.3 * draft[:, :1]
    target[:, :width] = draft + 0.4 * target[:, :width]  # mostly accepted
    keys = raw_keys(seed)
    start = rng.integers(1, 50, batch, np.int32)
    absolute = start[:, None] + np.arange(width, dtype=np.int32)
    tokens = np.asarray(draw_block(keys, draft, start))
    num_drafts = rng.integers(0, width + 1, batch, np.int32)
    block = DraftBlock(tokens, draft, num_drafts, np.broadcast_to(start[:, None], tokens.shape), absolute)
    everything = verify(keys, tokens, draft, target, num_drafts, num_drafts, start, rule="coupled")

    emitted = [[] for _ in range(batch)]
    done = np.zeros(batch, bool)
    shown, positions = target, start
    for _ in range(width + 2):
        n = np.asarray([data.draw(st.integers(0, int(k))) for k in block.num_drafts], np.int32)
        result = verify(keys, block.tokens, block.logits, shown, block.num_drafts, n, positions, "coupled")
        kept = jax.tree.map(np.asarray, carry(block, result))
        result = jax.tree.map(np.asarray, result)
        for b in range(batch):
            if not done[b]:
                count = int(result.num_emitted[b])
                emitted[b] += result.tokens[b, :count].tolist()
                done[b] = count > int(result.num_accepted[b])
        # Kept drafts, with everything that belongs to them, are the untested ones.
        for b in range(batch):
            count = int(kept.num_drafts[b])
            if count:
                at = np.asarray(kept.extras[b, :count]) - int(start[b])
                np.testing.assert_array_equal(kept.tokens[b, :count], tokens[b, at])
                np.testing.assert_array_equal(kept.logits[b, :count], draft[b, at])
                assert at[0] == len(emitted[b])
            assert (kept.tokens[b, count:] == -1).all()
        shown = np.stack([np.roll(shown[b], -result.num_accepted[b], axis=0) for b in range(batch)])
        positions = positions + result.num_accepted
        block = kept
        if done.all():
            break
    assert done.all()
    for b in range(batch):
        assert emitted[b] == everything.tokens[b, : int(everything.num_emitted[b])].tolist()


def test_a_rejection_discards_what_was_kept():
    # The target is certain of token 0: the first draft, 1, is rejected.
    target = np.full((BATCH, WIDTH + 1, SIZE), -np.inf, np.float32)
    target[:, :, 0] = 0
    tokens, none = np.zeros((BATCH, WIDTH), np.int32), np.zeros((BATCH,), np.int32)
    tokens[:, 0] = 1
    block = DraftBlock(tokens, None, none + WIDTH, np.zeros_like(tokens))
    result = verify(raw_keys(0), tokens, None, target, block.num_drafts, none, none, rule="coupled")
    assert result.num_tested[0] == 1 and result.tokens[0].tolist() == [0, -1, -1, -1, -1]
    assert not np.asarray(carry(block, result).num_drafts).any()


# ------------------------------------------------------------------------------------------------- as a component


def component_inputs(seed=0):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(5, BATCH, WIDTH + 1, SIZE)).astype(np.float32)
    tokens = np.ones((5, BATCH, WIDTH), np.int32)
    keys = np.stack([raw_keys(i) for i in range(5)])
    n = rng.integers(0, WIDTH + 1, (5, BATCH), np.int32)
    return keys, tokens, logits[:, :, :WIDTH], logits, n, n, n


def test_compiles_once_and_stays_on_the_device():
    keys, tokens, draft, target, *_ = (x[0] for x in component_inputs())
    before = len(TRACES)
    for i in range(20):
        n, m = np.asarray([i % 5, 3, 0, 1], np.int32), np.asarray([i % 3, 1, 2, 0], np.int32)
        verify(keys, tokens, draft, target, n, m, n, rule="coupled")
    assert len(TRACES) <= before + 1  # 0 where an earlier test had this shape
    one = functools.partial(verify, rule="coupled")
    assert_stays_on_device(one, keys, tokens, draft, target, *(np.ones((3, BATCH), np.int32)))


def test_runs_under_vmap_and_scan():
    inputs = component_inputs()
    one = functools.partial(verify, rule="coupled")
    mapped = jax.jit(jax.vmap(one))(*inputs)
    _, scanned = jax.jit(lambda x: jax.lax.scan(lambda c, y: (c, one(*y)), 0, x))(inputs)
    for i in range(5):
        single = one(*(x[i] for x in inputs))
        for a, b, c in zip(mapped, scanned, single, strict=True):
            np.testing.assert_array_equal(a[i], c)
            np.testing.assert_array_equal(b[i], c)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"draft_tokens": jnp.zeros((2, 3))}, TypeError, "draft_tokens: expected an integer dtype, got float32"),
        ({"draft_tokens": jnp.zeros(3, jnp.int32)}, ValueError, r"draft_tokens: expected shape \[B, K\], got \[3\]"),
        ({"target_logits": jnp.zeros((2, 3, 5))}, ValueError, r"target_logits: expected shape \[B=2, 4, V\]"),
        ({"draft_logits": jnp.zeros((2, 3, 6))}, ValueError, r"draft_logits: expected shape \[B=2, K=3, V=5\]"),
        ({"num_drafts": jnp.zeros(3, jnp.int32)}, ValueError, r"num_drafts: expected shape \[B=2\], got \[3\]"),
        ({"num_verified": jnp.zeros(2)}, TypeError, "num_verified: expected an integer dtype"),
        ({"positions": jnp.zeros(1, jnp.int32)}, ValueError, r"positions: expected shape \[B=2\]"),
        ({"rule": "deferred"}, ValueError, "rule: expected one of 'standard', 'coupled', got 'deferred'"),
        ({"key": jax.random.split(jax.random.key(0), 3)}, ValueError, r"key: expected one key or keys \[B=2\]"),
    ],
)
def test_bad_input_is_refused(own_checks, change, error, message):
    inputs = {
        "key": jax.random.key(0),
        "draft_tokens": jnp.zeros((2, 3), jnp.int32),
        "draft_logits": jnp.zeros((2, 3, 5)),
        "target_logits": jnp.zeros((2, 4, 5)),
        "num_drafts": jnp.full((2,), 3),
        "num_verified": jnp.full((2,), 3),
    }
    with pytest.raises(error, match=message):
        speculative_verify(**(inputs | change))
