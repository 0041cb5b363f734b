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
from tests.helpers import assert_stays_on_device, count_traces
from tests.laws import LawTest, at_total_variation, chi_square

HARD = st.sampled_from([-np.inf, np.nan, np.inf, -88.0, -3.0, 0.0, 0.5, 2.0, 60.0])


@functools.partial(jax.jit, static_argnames="rule")
def verify(key, tokens, draft, target, num_drafts, num_verified, positions, rule):
    return speculative_verify(key, tokens, draft, target, num_drafts, num_verified, rule=rule, positions=positions)


# ---------------------------------------------------------------------------------------------------- structure


# Few static variants, each compiled once per rule: [batch, width, vocabulary], dtype, point-mass drafts.
VARIANTS = [
    ((3, 3, 4), jnp.float32, False),
    ((3, 3, 4), jnp.bfloat16, False),
    ((3, 3, 4), jnp.float32, True),
    ((1, 1, 1), jnp.float32, False),
]


@st.composite
def rounds(draw):
    """A round with hard logits and ragged, possibly senseless, counts."""
    (batch, width, vocabulary), dtype, point_mass = draw(st.sampled_from(VARIANTS))
    tokens = draw(hnp.arrays(np.int32, (batch, width), elements=st.integers(-1, vocabulary)))
    draft = draw(hnp.arrays(np.float32, (batch, width, vocabulary), elements=HARD))
    target = draw(hnp.arrays(np.float32, (batch, width + 1, vocabulary), elements=HARD))
    counts = hnp.arrays(np.int32, (batch,), elements=st.integers(-2, width + 2))
    return (
        jax.random.split(jax.random.key(draw(st.integers(0, 999))), batch),
        jnp.asarray(tokens),
        None if point_mass else jnp.asarray(draft, dtype),
        jnp.asarray(target, dtype),
        jnp.asarray(draw(counts)),
        jnp.asarray(draw(counts)),
        jnp.asarray(draw(hnp.arrays(np.int32, (batch,), elements=st.integers(0, 1000)))),
    )


@given(rounds(), st.sampled_from(["standard", "coupled"]))
def test_the_output_is_a_prefix_of_the_drafts_plus_at_most_one_token(inputs, rule):
    _, tokens, draft, target, num_drafts, num_verified, _ = inputs
    result = jax.tree.map(np.asarray, verify(*inputs, rule=rule))
    width = tokens.shape[1]
    possible = np.asarray(law(target))
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
        impossible = acceptance_probabilities(tokens, draft, target).impossible
        assert not any(impossible[b, i] for b in range(tokens.shape[0]) for i in range(result.num_accepted[b]))


@given(rounds(), st.sampled_from(["standard", "coupled"]), st.randoms(use_true_random=False))
def test_permuting_requests_permutes_results(inputs, rule, random):
    order = list(range(inputs[1].shape[0]))
    random.shuffle(order)
    order = jnp.asarray(order)
    permuted = [None if x is None else x[order] for x in inputs]
    straight, shuffled = verify(*inputs, rule=rule), verify(*permuted, rule=rule)
    for before, after in zip(straight, shuffled, strict=True):
        np.testing.assert_array_equal(before[order], after)


@given(rounds(), st.sampled_from(["standard", "coupled"]))
def test_rows_that_were_not_fed_do_not_matter(inputs, rule):
    keys, tokens, draft, target, num_drafts, num_verified, positions = inputs
    fed = jnp.arange(target.shape[1])[None, :] <= jnp.clip(num_verified, 0, jnp.clip(num_drafts, 0, 99))[:, None]
    other = jnp.where(fed[:, :, None], target, jnp.asarray(7.0, target.dtype))
    before = verify(*inputs, rule=rule)
    after = verify(keys, tokens, draft, other, num_drafts, num_verified, positions, rule=rule)
    for one, two in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, two)


@given(rounds())
def test_acceptance_probabilities_are_probabilities(inputs):
    _, tokens, draft, target, num_drafts, *_ = inputs
    result = acceptance_probabilities(tokens, draft, target, num_drafts)
    for values in (result.token, result.prefix):
        assert ((values >= 0) & (values <= 1)).all()
    beyond = np.arange(tokens.shape[1])[None, :] >= np.asarray(num_drafts)[:, None]
    assert not np.asarray(result.token)[beyond].any() and not np.asarray(result.impossible)[beyond].any()


def test_equal_laws_accept_everything():
    logits = jax.random.normal(jax.random.key(0), (50, 4, 9)) * 3
    tokens = jax.random.randint(jax.random.key(1), (50, 3), 0, 9)
    full = jnp.full((50,), 3)
    keys = jax.random.split(jax.random.key(2), 50)
    result = verify(keys, tokens, logits[:, :3], logits, full, full, full, rule="standard")
    assert (result.num_accepted == 3).all() and (result.num_emitted == 4).all()


def test_a_vanishing_residual_draws_from_the_target():
    # In float32 max(p - q, 0) is zero everywhere although the draft is rejected: q(x) = 0 for the drafted token.
    target = jnp.log(jnp.asarray([[[0.5, 0.5, 0.0], [0.5, 0.5, 0.0]]]))
    one = jnp.asarray([1])
    keys = jax.random.split(jax.random.key(0), 1)
    result = verify(keys, jnp.asarray([[2]]), target[:, :1], target, one, one, one, rule="standard")
    assert result.num_accepted[0] == 0 and result.tokens[0, 0] in (0, 1)


# ---------------------------------------------------------------------------------------------------------- laws

NUMBER = 200_000


def emit(tables, rule, num_drafts, num_verified, *, dtype=jnp.float32, point_mass=False, seed=0):
    """One round of NUMBER requests over bigram-like tables; returns emitted tokens and counts.

    tables: (q1 [V], q2 [V, V], p1 [V], p2 [V, V], p3 [V, V]) logits; rows of the second and third position are chosen
    by the draft before. Drafts are drawn with the library's keys.
    """
    lengths = [jnp.asarray(n, jnp.int32) for n in (num_drafts, num_verified)]
    logits = [jnp.asarray(table, dtype) for table in tables]
    return jax.tree.map(np.asarray, emit_compiled(jax.random.key(seed), logits, *lengths, rule, point_mass))


@functools.partial(jax.jit, static_argnums=(4, 5))
def emit_compiled(key, tables, num_drafts, num_verified, rule, point_mass):
    q1, q2, p1, p2, p3 = tables
    keys = request_keys(key, NUMBER)
    zero = jnp.zeros((NUMBER,), jnp.int32)
    row1 = jnp.broadcast_to(q1, (NUMBER, *q1.shape))
    if point_mass:
        x1 = zero + 1
        x2 = (x1 + 1) % len(q1)
    else:
        x1 = sample(draft_keys(keys, zero, zero), row1)
        x2 = sample(draft_keys(keys, zero + 1, zero), q2[x1])
    draft = None if point_mass else jnp.stack([row1, q2[x1]], axis=1)
    target = jnp.stack([jnp.broadcast_to(p1, row1.shape), p2[x1], p3[x2]], axis=1)
    drafts = jnp.stack([x1, x2], axis=1)
    return speculative_verify(
        keys, drafts, draft, target, zero + num_drafts, zero + num_verified, rule=rule, positions=zero
    )


def tables(seed, size=4, scale=1.2):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape) * scale for shape in ((size,), (size, size), (size,), (size, size), (size, size))]


def probabilities(logits, dtype=jnp.float32):
    """float64 softmax of the logits as the device sees them."""
    z = np.asarray(jnp.asarray(logits, dtype).astype(jnp.float32), np.float64)
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


def test_emitted_laws_in_bfloat16():
    logits = tables(11)
    result = emit(logits, "coupled", 2, 1, dtype=jnp.bfloat16)
    assert all(t.passed for t in check_laws(result, *(probabilities(t, jnp.bfloat16) for t in logits[2:])))


@pytest.mark.parametrize("rule", ["standard", "coupled"])
def test_emitted_laws_of_point_mass_drafts(rule):
    logits = tables(12)
    result = emit(logits, rule, 2, 1, point_mass=True)
    assert all(t.passed for t in check_laws(result, *(probabilities(t) for t in logits[2:])))


def test_emitted_laws_when_the_draft_excludes_tokens():
    logits = tables(13)
    logits[0][2] = -np.inf
    logits[1][:, 0] = -np.inf
    logits[3][:, 1] = -np.inf
    result = emit(logits, "coupled", 2, 2)
    assert all(t.passed for t in check_laws(result, *(probabilities(t) for t in logits[2:])))


@pytest.mark.parametrize("mass", [1.0, 0.1, 1e-2, 1e-3, 1e-4])
def test_residual_tokens_follow_the_residual_law(mass):
    # p = (1 - mass) q + mass r, with q and r on disjoint tokens: a rejection must draw from r.
    q = np.asarray([0.5, 0.5, 0, 0, 0])
    r = np.asarray([0, 0, 0.2, 0.3, 0.5])
    p = (1 - mass) * q + mass * r
    with np.errstate(divide="ignore"):
        row_q, row_p = np.log(q), np.log(p)
    batch, hits, rejected = 500_000, np.zeros(5), 0

    @jax.jit
    def run(key):
        keys = jax.random.split(key, batch)
        zero = jnp.zeros((batch,), jnp.int32)
        draft = jnp.broadcast_to(jnp.asarray(row_q, jnp.float32), (batch, 1, 5))
        target = jnp.broadcast_to(jnp.asarray(row_p, jnp.float32), (batch, 2, 5))
        tokens = sample(draft_keys(keys, zero, zero), draft[:, 0])[:, None]
        result = speculative_verify(keys, tokens, draft, target, zero + 1, zero + 1, rule="standard", positions=zero)
        lost = result.num_accepted == 0
        return jnp.zeros(6).at[jnp.where(lost, result.tokens[:, 0], 5)].add(1.0), jnp.sum(lost)

    repeats = 1 if mass > 1e-3 else 4
    for seed in range(repeats):
        counts, lost = run(jax.random.key(seed))
        hits += np.asarray(counts)[:5]
        rejected += int(lost)
    assert hits[:2].sum() == 0
    assert chi_square([rejected, repeats * batch - rejected], [mass, 1 - mass]).passed
    assert chi_square(hits, r).passed


def test_rare_tokens_keep_their_mass_through_verification():
    # 1,000 tokens of probability 1e-7 that the draft never proposes: they can come from the residual only.
    size, batch = 1001, 20_000
    target_row = jnp.log(jnp.full((size,), 1e-7).at[500].set(1.0))
    draft_row = jnp.full((size,), -jnp.inf).at[500].set(0.0)

    @jax.jit
    def hits(key):
        keys = jax.random.split(key, batch)
        full = jnp.ones((batch,), jnp.int32)
        result = speculative_verify(
            keys,
            jnp.full((batch, 1), 500),
            jnp.broadcast_to(draft_row, (batch, 1, size)),
            jnp.broadcast_to(target_row, (batch, 2, size)),
            full,
            full,
            rule="standard",
            positions=full,
        )
        return jnp.sum(result.tokens[:, 0] != 500)

    count = sum(int(hits(jax.random.key(seed))) for seed in range(55))
    test = chi_square([count, 55 * batch - count], [1e-4 / (1 + 1e-4), 1 / (1 + 1e-4)])
    assert test.passed


def test_greedy_and_sampled_rows_share_a_batch():
    logits = jnp.asarray(np.random.default_rng(4).normal(size=(2, 3, 5)), jnp.float32)
    batch = 50_000
    temperature = jnp.where(jnp.arange(batch) % 2 == 0, 0.0, 1.0)
    target = process_logits(jnp.broadcast_to(logits[0], (batch, 3, 5)), SamplingParams(temperature))
    draft = jnp.broadcast_to(logits[1, :2], (batch, 2, 5))
    keys = jax.random.split(jax.random.key(0), batch)
    zero = jnp.zeros((batch,), jnp.int32)
    tokens = jnp.stack([sample(draft_keys(keys, zero + i, zero), draft[:, i]) for i in range(2)], axis=1)
    result = verify(keys, tokens, draft, target, zero + 2, zero + 1, zero, rule="coupled")
    emitted = np.asarray(result.tokens[:, 0])
    assert (emitted[::2] == int(jnp.argmax(logits[0, 0]))).all()
    assert chi_square(np.bincount(emitted[1::2], minlength=5), probabilities(logits[0, 0])).passed


# ------------------------------------------------------------------------------------------------------ deferred


carry = jax.jit(carry_over)


@settings(max_examples=15)
@given(st.integers(0, 10_000), st.data())
def test_deferred_blocks_emit_bitwise_what_verifying_everything_emits(seed, data):
    batch, width, size = 4, 4, 5
    rng = np.random.default_rng(seed)
    draft = jnp.asarray(rng.normal(size=(batch, width, size)), jnp.float32)
    target = draft[:, :1].repeat(width + 1, axis=1) * 0.3 + jnp.asarray(
        rng.normal(size=(batch, width + 1, size)), jnp.float32
    )
    target = target.at[:, :width].set(draft + 0.4 * target[:, :width])  # mostly accepted
    keys = jax.random.split(jax.random.key(seed), batch)
    start = jnp.asarray(rng.integers(1, 50, batch), jnp.int32)
    absolute = start[:, None] + jnp.arange(width)[None, :]
    tokens = jnp.stack([sample(draft_keys(keys, absolute[:, i], start), draft[:, i]) for i in range(width)], axis=1)
    num_drafts = jnp.asarray(rng.integers(0, width + 1, batch), jnp.int32)
    block = DraftBlock(tokens, draft, num_drafts, jnp.broadcast_to(start[:, None], tokens.shape), absolute)
    everything = verify(keys, tokens, draft, target, num_drafts, num_drafts, start, rule="coupled")

    emitted = [[] for _ in range(batch)]
    done = np.zeros(batch, bool)
    shown, positions = np.asarray(target), start
    for _ in range(width + 2):
        n = jnp.asarray([data.draw(st.integers(0, int(k))) for k in block.num_drafts])
        result = verify(keys, block.tokens, block.logits, jnp.asarray(shown), block.num_drafts, n, positions, "coupled")
        for b in range(batch):
            if not done[b]:
                count = int(result.num_emitted[b])
                emitted[b] += result.tokens[b, :count].tolist()
                done[b] = count > int(result.num_accepted[b])
        # Kept drafts, with everything that belongs to them, are the untested ones.
        kept = carry(block, result)
        for b in range(batch):
            count = int(kept.num_drafts[b])
            if count:
                at = np.asarray(kept.extras[b, :count]) - int(start[b])
                np.testing.assert_array_equal(kept.tokens[b, :count], tokens[b, at])
                np.testing.assert_array_equal(kept.logits[b, :count], draft[b, at])
                assert at[0] == len(emitted[b])
            assert (kept.tokens[b, count:] == -1).all()
        accepted = np.asarray(result.num_accepted)
        shown = np.stack([np.roll(shown[b], -accepted[b], axis=0) for b in range(batch)])
        positions = positions + result.num_accepted
        block = kept
        if done.all():
            break
    assert done.all()
    for b in range(batch):
        assert emitted[b] == everything.tokens[b, : int(everything.num_emitted[b])].tolist()


def test_a_rejection_discards_what_was_kept():
    logits = jnp.zeros((1, 3, 2)).at[:, :, 1].set(-jnp.inf)
    block = DraftBlock(jnp.asarray([[1, 0, 0]]), None, jnp.asarray([3]), jnp.zeros((1, 3), jnp.int32))
    target = jnp.concatenate([logits, logits[:, :1]], axis=1)
    keys, none = jax.random.split(jax.random.key(0), 1), jnp.asarray([0])
    result = verify(keys, block.tokens, None, target, block.num_drafts, none, none, rule="coupled")
    assert result.num_tested[0] == 1 and result.tokens[0].tolist() == [0, -1, -1, -1]
    assert carry_over(block, result).num_drafts[0] == 0


# ------------------------------------------------------------------------------------------------- as a component


def test_compiles_once_and_stays_on_the_device():
    logits = jax.random.normal(jax.random.key(0), (4, 4, 6))
    tokens = jnp.zeros((4, 3), jnp.int32)
    keys = jax.random.split(jax.random.key(1), 4)
    function = functools.partial(speculative_verify, rule="coupled")
    jitted, traces = count_traces(lambda n, m: function(keys, tokens, logits[:, :3], logits, n, m, positions=n))
    for i in range(20):
        jitted(jnp.asarray([i % 4, 3, 0, 1]), jnp.asarray([i % 3, 1, 2, 0]))
    assert len(traces) == 1
    assert_stays_on_device(lambda n: function(keys, tokens, logits[:, :3], logits, n, n, positions=n), tokens[:, 0])


def test_runs_under_vmap_and_scan():
    logits = jax.random.normal(jax.random.key(0), (5, 2, 4, 6))
    tokens = jnp.ones((5, 2, 3), jnp.int32)
    keys = jax.random.split(jax.random.key(1), (5, 2))
    n = jnp.full((5, 2), 2)
    one = lambda k, t, z, m: speculative_verify(k, t, z[:, :3], z, m, m, positions=m)  # noqa: E731
    mapped = jax.jit(jax.vmap(one))(keys, tokens, logits, n)
    _, scanned = jax.jit(lambda x: jax.lax.scan(lambda c, y: (c, one(*y)), 0, x))((keys, tokens, logits, n))
    for a, b, c in zip(mapped, scanned, jax.jit(one)(keys[0], tokens[0], logits[0], n[0]), strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a[0], c)


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
