"""Kill functions of the mutation test: what verification, its noise, its blocks and its labels must satisfy.

Each takes a `tests.mutations.Library` and asserts. Most run without jit, on few shapes: their primitives are compiled
once for all mutants, where a jitted function would be compiled for each. Laws of one round are exact: the noise is
replaced by an enumeration of all outcomes, and the probabilities are those that the library asked for.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from tests.mutations import Vectorised

# Compilation dominates: every mutant is another function. Unoptimised code computes the same.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})

# ------------------------------------------------------------------------------------- one round, all outcomes

SIZE, WIDTH = 3, 2
COUNTS = [(verified, drafts) for drafts in range(WIDTH + 1) for verified in range(drafts + 1)]


@functools.cache
def _laws():
    """Two sets of laws (q_1, q_2 given x_1; p_1, p_2 given x_1, p_3 given x_2): smooth, and with many zeros."""
    rng = np.random.default_rng(0)
    smooth = [rng.dirichlet(np.ones(SIZE), size=shape) for shape in ((), (SIZE,), (), (SIZE,), (SIZE,))]
    greedy = np.eye(SIZE)[[1, 2, 2]]
    zeros = [np.array([0.0, 0.25, 0.75]), smooth[1][:, [2, 0, 1]], np.array([0.5, 0.0, 0.5]), greedy, smooth[4]]
    return [np.stack(pair) for pair in zip(smooth, zeros, strict=True)]


@functools.cache
def _outcomes():
    """Every set of laws, pair of drafts, pair of counts, pattern of two verdicts and token that may be added."""
    axes = [range(2), range(SIZE), range(SIZE), range(len(COUNTS)), range(2), range(2), range(SIZE)]
    return np.array(list(itertools.product(*axes))).T


def as_logits(probabilities):
    with np.errstate(divide="ignore"):
        return jnp.asarray(np.log(probabilities), jnp.float32)


def _replace_noise(noise, verification, bernoulli, categorical):
    """Puts draws that take whole batches in the place of the library's; keys become anything of shape [B]."""
    noise.bernoulli, noise.categorical = bernoulli, categorical
    noise.request_keys, noise.verdict_keys = (lambda key, batch: key), (lambda keys, positions, purpose: keys)
    verification.jax = Vectorised(bernoulli, categorical)


def _one_round(lib, rule, point_mass):
    """All outcomes of a round: the result, and each outcome's probability given its drafts."""
    which, x1, x2, count, *verdicts, added = _outcomes()
    q1, q2, p1, p2, p3 = _laws()
    verified, drafts = np.asarray(COUNTS)[count].T
    draft = np.stack([q1[which], q2[which, x1]], axis=1)
    target = np.stack([p1[which], p2[which, x1], p3[which, x2]], axis=1)
    # Rows that were not fed hold something else altogether.
    target = np.where((np.arange(WIDTH + 1) > verified[:, None])[:, :, None], [0.01, 0.01, 0.98], target)
    seen = {}

    def bernoulli(keys, probability):
        seen["accept"] = np.clip(np.asarray(probability, np.float64), 0, 1)
        return jnp.asarray(np.stack(verdicts, axis=1) == 1)

    def categorical(keys, weights):
        seen["weights"] = np.asarray(weights, np.float64)
        return jnp.asarray(added, jnp.int32)

    _replace_noise(lib.randomness, lib.verification, bernoulli, categorical)
    result = lib.verification.speculative_verify(
        jnp.zeros(len(which), jnp.int32),
        jnp.asarray(np.stack([x1, x2], axis=1), jnp.int32),
        None if point_mass else as_logits(draft),
        as_logits(target),
        jnp.asarray(drafts),
        jnp.asarray(verified),
        rule=rule,
    )
    accept, weights = seen["accept"], seen["weights"]
    assert np.isfinite(accept).all() and np.isfinite(weights).all()
    assert (weights >= 0).all() and (weights.sum(axis=1) > 0).all()
    probability = np.prod(np.where(np.stack(verdicts, axis=1) == 1, accept, 1 - accept), axis=1)
    probability *= weights[np.arange(len(which)), added] / weights.sum(axis=1)
    return jax.tree.map(np.asarray, result), probability


def exact_law_of_verification(lib):
    """What a round emits, continued from the target, has the target's law: for all counts, rules, and laws."""
    which, x1, x2, count, *_ = _outcomes()
    q1, q2, p1, p2, p3 = _laws()
    sequences = np.array(list(itertools.product(range(SIZE), repeat=WIDTH + 1)))
    y1, y2, y3 = sequences.T
    steps = np.stack([p1[:, y1], p2[:, y1, y2], p3[:, y2, y3]], axis=2)  # [set of laws, sequence, position]
    wanted = steps.prod(axis=2)
    for rule, point_mass in itertools.product(("standard", "coupled"), (False, True)):
        result, probability = _one_round(lib, rule, point_mass)
        emitted = np.arange(WIDTH + 1) < result.num_emitted[:, None]
        agrees = (result.tokens[:, None, :] == sequences) | ~emitted[:, None, :]
        rest = np.where(emitted[:, None, :], 1.0, steps[which]).prod(axis=2)
        if not point_mass:  # averaged over the drafts' own law
            probability = probability * q1[which, x1] * q2[which, x1, x2]
            groups, laws = [2, len(COUNTS)], wanted[:, None]
            index = which * len(COUNTS) + count
        else:  # exact for every draft
            groups, laws = [2, SIZE, SIZE, len(COUNTS)], wanted[:, None, None, None]
            index = ((which * SIZE + x1) * SIZE + x2) * len(COUNTS) + count
        law = np.zeros((int(np.prod(groups)), len(sequences)))
        np.add.at(law, index, probability[:, None] * agrees.all(axis=2) * rest)
        np.testing.assert_allclose(law.reshape(*groups, -1) - laws, 0.0, atol=2e-6)


def counts_and_padding(lib):
    """num_tested is the rule's, every round emits, an added token follows the accepted drafts, then -1."""
    _, x1, x2, count, *verdicts, added = _outcomes()
    verified, drafts = np.asarray(COUNTS)[count].T
    for rule in ("standard", "coupled"):
        result, _ = _one_round(lib, rule, False)
        tested = verified if rule == "standard" else np.minimum(verified + 1, drafts)
        np.testing.assert_array_equal(result.num_tested, tested)
        first = np.where(verdicts[0] == 0, 0, np.where(verdicts[1] == 0, 1, 2))
        accepted = np.minimum(first, tested)
        np.testing.assert_array_equal(result.num_accepted, accepted)
        adds = (accepted < tested) | (tested == verified)
        np.testing.assert_array_equal(result.num_emitted, accepted + adds)
        tokens = np.stack([x1, x2, np.full_like(x1, -1)], axis=1)
        tokens = np.where(np.arange(3) < accepted[:, None], tokens, -1)
        rows = np.flatnonzero(adds)
        tokens[rows, accepted[rows]] = added[rows]
        np.testing.assert_array_equal(result.tokens, tokens)


def counts_out_of_range_are_clamped(lib):
    """Senseless counts verify what the nearest possible ones do, without a trace of the empty slots."""
    drafts, verified = np.array(list(itertools.product(range(-1, WIDTH + 2), repeat=2))).T
    batch = len(drafts)
    rng = np.random.default_rng(1)
    draft, target = (as_logits(rng.dirichlet(np.ones(SIZE), size=(batch, w))) for w in (WIDTH, WIDTH + 1))
    tokens = jnp.asarray(rng.integers(0, SIZE, (batch, WIDTH)), jnp.int32)
    keys = jax.random.split(jax.random.key(0), batch)
    inside = np.clip(drafts, 0, WIDTH)
    other = jnp.where(np.arange(WIDTH) < inside[:, None], tokens, -1)
    verify = quick_jit(functools.partial(lib.verification.speculative_verify, rule="coupled"))
    given = verify(keys, tokens, draft, target, jnp.asarray(drafts), jnp.asarray(verified))
    want = verify(keys, other, draft, target, jnp.asarray(inside), jnp.asarray(np.clip(verified, 0, inside)))
    for a, b in zip(given, want, strict=True):
        np.testing.assert_array_equal(a, b)
    assert (np.asarray(given.num_emitted) >= 1).all()


def an_impossible_draft_leaves_the_target_law(lib):
    """A draft outside the draft's law is rejected; where p = q the token then comes from p itself."""
    noise, verification, seen = lib.randomness, lib.verification, {}

    def bernoulli(keys, probability):
        seen["accept"] = np.asarray(probability)
        return probability >= 1

    def categorical(keys, weights):
        seen["weights"] = np.asarray(weights)
        return jnp.zeros(len(weights), jnp.int32)

    _replace_noise(noise, verification, bernoulli, categorical)
    p = np.array([[[0.5, 0.5, 0.0]] * 2] * 3)
    one = jnp.ones(3, jnp.int32)
    tokens = jnp.asarray([[2], [-1], [SIZE]], jnp.int32)
    result = verification.speculative_verify(one, tokens, as_logits(p[:, :1]), as_logits(p), one, one, rule="standard")
    np.testing.assert_array_equal(seen["accept"], 0.0)
    np.testing.assert_allclose(seen["weights"], p[:, 0], atol=1e-6)
    np.testing.assert_array_equal(result.num_emitted, 1)


# ------------------------------------------------------------------------------------------------------- noise


def noise_belongs_to_the_token(lib):
    """Keys are those of a request's position and purpose, whatever block they are used in, and no two are alike."""
    noise, verification, used = lib.randomness, lib.verification, {}
    keys = noise.request_keys(jax.random.key(0), 2)

    def run(start, verdicts, verified):
        """Keys of both tests and of the added token of a block that begins at `start`; uint32 [2, ...]."""

        def bernoulli(keys, probability):
            used["accept"] = np.asarray(jax.random.key_data(keys))
            return jnp.broadcast_to(jnp.asarray(verdicts), probability.shape)

        def categorical(keys, weights):
            used["added"] = np.asarray(jax.random.key_data(keys))
            return jnp.zeros(len(weights), jnp.int32)

        noise.bernoulli, noise.categorical, verification.jax = (
            bernoulli,
            categorical,
            Vectorised(bernoulli, categorical),
        )
        at, full = jnp.full((2,), start, jnp.int32), jnp.full((2,), 2, jnp.int32)
        laws = jnp.zeros((2, 3, 2))
        tokens = jnp.zeros((2, 2), jnp.int32)
        arguments = (keys, tokens, laws[:, :2], laws, full, full * 0 + verified)
        verification.speculative_verify(*arguments, rule="standard", positions=at)
        return used["accept"], used["added"]

    accept5, bonus7 = run(5, [True, True], 2)
    accept6, residual7 = run(6, [True, False], 2)
    np.testing.assert_array_equal(accept5[:, 1], accept6[:, 0])
    np.testing.assert_array_equal(run(7, [True, True], 0)[1], bonus7)
    np.testing.assert_array_equal(run(7, [False, True], 2)[1], residual7)

    def draft(position, committed):
        at = jnp.full((2,), position, jnp.int32)
        return np.asarray(jax.random.key_data(noise.draft_keys(keys, at, jnp.full((2,), committed, jnp.int32))))

    drafts = [draft(position, committed) for position in (6, 7) for committed in (5, 6)]
    bonus6 = run(6, [True, True], 0)[1]
    everything = np.concatenate([accept5[:, 0], accept5[:, 1], accept6[:, 1], residual7, bonus6, *drafts])
    assert len(np.unique(everything, axis=0)) == len(everything)


def draws_follow_the_weights(lib):
    """The exact law of `categorical`, by all paths down its tree; the edges of its 64-bit comparison."""
    noise = lib.randomness
    below = noise._below
    cases = [(0x7FFFFFFF, 0xFFFFFFFF, 0.5, True), (0x80000000, 0, 0.5, False), (0, 0, 0.0, False)]
    cases += [(0xFFFFFFFF, 0xFFFFFFFF, 1.0, True), (0, 0x7FFFFFFF, 2.0**-33, True), (0, 0x80000000, 2.0**-33, False)]
    for high, low, probability, wanted in cases:
        bits = jnp.asarray([high, low], jnp.uint32)
        assert bool(below(bits, jnp.float32(probability))) == wanted, (high, low, probability)
    for weights in ([0.5, 2.0, 1.5], [0.0, 3.0, 1e-9], [1.0, 0.0, 0.0, 2.0, 5.0]):
        depth = (len(weights) - 1).bit_length()
        law = np.zeros(len(weights))
        for path in itertools.product([False, True], repeat=depth):
            choices, shares = iter(path), []

            def scripted(bits, share, choices=choices, shares=shares):
                choice = next(choices)
                shares.append(float(share) if choice else 1 - float(share))
                return jnp.asarray(choice)

            noise._below = scripted
            index = int(noise.categorical(jax.random.key(0), jnp.asarray(weights, jnp.float32)))
            if np.prod(shares):
                assert index < len(weights)
                law[index] += np.prod(shares)
        np.testing.assert_allclose(law, np.array(weights) / np.sum(weights), rtol=1e-5, atol=1e-15)


# -------------------------------------------------------------------------------------------- blocks and labels


def carried_drafts_are_the_untested_ones(lib):
    """Kept drafts, their laws, origins and extras are those behind the last test; a rejection keeps none."""
    verification, width = lib.verification, 3
    drafts, tested, accepted = np.array([(3, 1, 1), (3, 1, 0), (3, 2, 2), (3, 3, 3), (2, 1, 1), (0, 0, 0)]).T
    batch = len(drafts)
    tokens = np.arange(batch * width).reshape(batch, width)
    whole = [jnp.asarray(x, jnp.int32) for x in (tokens, drafts, accepted, tested)]
    logits = jnp.asarray(tokens[:, :, None] + np.array([0.25, 0.5]), jnp.float32)
    block = verification.DraftBlock(whole[0], logits, whole[1], whole[0] + 100, {"feature": logits[:, :, 0]})
    emitted = jnp.zeros((batch, width + 1), jnp.int32)
    kept = verification.carry_over(block, verification.VerifyResult(emitted, whole[2], whole[2], whole[3]))
    kept, logits = jax.tree.map(np.asarray, (kept, logits))
    number = np.where(accepted == tested, drafts - tested, 0)
    np.testing.assert_array_equal(kept.num_drafts, number)
    for b in range(batch):
        source = slice(int(tested[b]), int(tested[b] + number[b]))
        np.testing.assert_array_equal(kept.tokens[b, : number[b]], tokens[b, source])
        np.testing.assert_array_equal(kept.tokens[b, number[b] :], -1)
        np.testing.assert_array_equal(kept.origin[b, : number[b]], tokens[b, source] + 100)
        np.testing.assert_array_equal(kept.logits[b, : number[b]], logits[b, source])
        np.testing.assert_array_equal(kept.extras["feature"][b, : number[b]], logits[b, source, 0])


def deferred_is_bitwise(lib):
    """A block verified in pieces, whatever the pieces, emits bit for bit what verifying it at once emits."""
    verification, sampling = lib.verification, lib.sampling
    batch, width, rng = 64, 3, np.random.default_rng(2)
    draft = rng.normal(size=(batch, width, SIZE))
    target = np.concatenate([draft + 0.7 * rng.normal(size=draft.shape), rng.normal(size=(batch, 1, SIZE))], axis=1)
    draft, target = jnp.asarray(draft, jnp.float32), np.asarray(target, np.float32)
    keys, start = jax.random.split(jax.random.key(3), batch), jnp.asarray(rng.integers(1, 50, batch), jnp.int32)
    at = start[:, None] + jnp.arange(width, dtype=jnp.int32)[None, :]

    @quick_jit
    def draw(keys, logits):
        noise = lib.randomness.draft_keys(*jnp.broadcast_arrays(keys[:, None], at, start[:, None]))
        return sampling.sample(noise.reshape(-1), logits.reshape(-1, SIZE)).reshape(batch, width)

    block = verification.DraftBlock(
        draw(keys, draft), draft, jnp.full((batch,), width, jnp.int32), jnp.zeros((batch, width), jnp.int32)
    )

    @quick_jit
    def verify(block, target, n, positions):
        arguments = (keys, block.tokens, block.logits, target, block.num_drafts, n)
        result = verification.speculative_verify(*arguments, rule="coupled", positions=positions)
        return result, verification.carry_over(block, result)

    whole, _ = verify(block, target, block.num_drafts, start)
    emitted, done, positions = [[] for _ in range(batch)], np.zeros(batch, bool), start
    for _ in range(width + 1):
        n = jnp.asarray(rng.integers(0, np.asarray(block.num_drafts) + 1), jnp.int32)
        result, block = verify(block, target, n, positions)
        number, accepted, shown = (np.asarray(x) for x in (result.num_emitted, result.num_accepted, result.tokens))
        for b in np.flatnonzero(~done):
            emitted[b] += shown[b, : number[b]].tolist()
            done[b] = number[b] > accepted[b]
        target = np.stack([np.roll(row, -count, axis=0) for row, count in zip(target, accepted, strict=True)])
        positions = positions + result.num_accepted
    assert done.all()
    tokens, number = np.asarray(whole.tokens), np.asarray(whole.num_emitted)
    assert emitted == [row[:count].tolist() for row, count in zip(tokens, number, strict=True)]


def labels_equal_a_walk(lib):
    """Labels of all counts, against a walk through the tests; how many tests each rule makes."""
    labels, width = lib.labels, 3
    cases = [(a, t, limit) for t in range(width + 1) for a in range(t + 1) for limit in range(width + 1)]
    accepted, tested, limit = (jnp.asarray(x, jnp.int32) for x in zip(*cases, strict=True))
    got = jax.tree.map(np.asarray, labels.verification_labels(accepted, tested, width, num_labelled=limit))
    for b, (a, t, end) in enumerate(cases):
        seen = [i < end and i < t and i <= a for i in range(width)]
        assert got.observed[b].tolist() == seen, cases[b]
        assert (got.accepted[b] & got.observed[b]).tolist() == [s and i < a for i, s in enumerate(seen)], cases[b]
    verified, drafts = (jnp.asarray(x, jnp.int32) for x in zip(*COUNTS, strict=True))
    for rule in ("standard", "coupled", "deferred"):
        wanted = [n if rule == "standard" else min(n + 1, k) for n, k in COUNTS]
        assert labels.num_tested_drafts(verified, drafts, rule).tolist() == wanted


KILLS = (
    exact_law_of_verification,
    counts_and_padding,
    counts_out_of_range_are_clamped,
    an_impossible_draft_leaves_the_target_law,
    noise_belongs_to_the_token,
    draws_follow_the_weights,
    carried_drafts_are_the_untested_ones,
    deferred_is_bitwise,
    labels_equal_a_walk,
)
