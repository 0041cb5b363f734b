"""Kill functions of the mutation test: properties of the package that a planted fault must break.

Each takes a `tests.mutations.Library` and asserts. Those of one round mostly run without jit, on few shapes: their
primitives are compiled once for all mutants, where a jitted function would be compiled for each; and their laws are
exact: the noise is replaced by an enumeration of all outcomes, and the probabilities are those that the library asked
for. Laws of the loop are tested on samples, with the library's own noise.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from tests.laws import chi_square
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


def _logits(probabilities):
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
        None if point_mass else _logits(draft),
        _logits(target),
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
    draft, target = (_logits(rng.dirichlet(np.ones(SIZE), size=(batch, w))) for w in (WIDTH, WIDTH + 1))
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
    result = verification.speculative_verify(one, tokens, _logits(p[:, :1]), _logits(p), one, one, rule="standard")
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


# ----------------------------------------------------------------------------------------------------- trimmer


def survival_is_a_monotone_product(lib):
    """The product of probabilities (others clipped), never increasing in floats, 0 in empty slots."""
    survive = lib.survival.survival_probabilities
    acceptance = jnp.asarray([[1.5, 0.5, 0.5], [np.nan, 1, 1], [1, 0.25, 0.5], [-1, 1, 1]], jnp.float32)
    got = survive(acceptance, jnp.asarray([3, 3, 2, 3]))
    np.testing.assert_array_equal(got, [[1, 0.5, 0.25], [0, 0, 0], [1, 0.25, 0], [0, 0, 0]])
    rounding = 1 - np.random.default_rng(0).uniform(0, 3e-7, (200, 33)).astype(np.float32)
    got = np.asarray(survive(jnp.asarray(rounding), jnp.full((200,), 33, jnp.int32)))
    assert (got[:, 1:] <= got[:, :-1]).all()


def _ranked(survival, num_drafts):
    """Valid slots in the order (-S, position, request)."""
    return sorted((-float(survival[r, i]), i, r) for r in range(len(survival)) for i in range(num_drafts[r]))


def allocation_equals_brute_force(lib):
    """Both methods, for all survivals over three values of 2 requests and 2 positions, all lengths and budgets."""
    rows = [row for row in itertools.product([0.0, 0.5, 1.0], repeat=2) if row[1] <= row[0]]
    cases = list(
        itertools.product(itertools.product(rows, repeat=2), range(-1, 6), itertools.product(range(3), repeat=2))
    )
    wanted = np.zeros((len(cases), 2), np.int32)
    for number, (survival, budget, drafts) in enumerate(cases):
        for _, _, request in _ranked(np.array(survival), drafts)[: max(budget, 0)]:
            wanted[number, request] += 1
    survival, budget, drafts = zip(*cases, strict=True)
    arrays = jnp.asarray(survival, jnp.float32), jnp.asarray(budget, jnp.int32), jnp.asarray(drafts, jnp.int32)
    for method in ("sort", "pairwise"):
        allocate = jax.vmap(functools.partial(lib.trimmer.allocate_budget, method=method))
        np.testing.assert_array_equal(allocate(*arrays), wanted)
        slots = jax.vmap(functools.partial(lib.trimmer.allocate_slots, method=method))(*arrays)
        np.testing.assert_array_equal(slots, np.arange(2) < wanted[:, :, None])
        # A score that rises along a request must not let a later slot in first.
        rising = lib.trimmer.allocate_slots(
            jnp.asarray([[0.25, 1.0], [0.5, 0.5]]), 1, jnp.asarray([2, 2]), method=method
        )
        np.testing.assert_array_equal(rising, [[False, False], [True, False]])


def budget_equals_exhaustive_search(lib):
    """Tokens per second at every budget in float64, ties to the smallest; both searches."""
    rng, choose = np.random.default_rng(4), lib.trimmer.choose_budget
    sizes, times = np.arange(1, 9), np.array([1.0, 1.0, 1.25, 1.25, 2.0, 2.0, 2.5, 4.0])
    costs = lib.costs.cost_table(sizes, times, draft_sizes=[1, 2], draft_times=[0.25, 2.0])
    number = 40
    survival = np.minimum.accumulate(rng.integers(0, 5, (number, 2, 2)) / 4, axis=2)
    drafts, base, sampling = rng.integers(0, 3, (number, 2)), rng.integers(1, 5, number), rng.integers(1, 4, number)
    wanted = {"argmax": [], "early_stop": []}
    for s, n, b, m in zip(survival, drafts, base, sampling, strict=True):
        best = [-value for value, _, _ in _ranked(s, n)]
        drafting = [0.0, 0.25, 2.0][int((n > 0).sum())]
        rates = [(m + sum(best[:taken])) / (drafting + times[b + taken - 1]) for taken in range(len(best) + 1)]
        wanted["argmax"].append(int(np.argmax(rates)))
        stops = [i for i, rate in enumerate(rates) if i + 1 == len(rates) or rates[i + 1] <= rate]
        wanted["early_stop"].append(stops[0])
    assert len(set(wanted["argmax"])) > 3 and wanted["argmax"] != wanted["early_stop"]
    numbers = [jnp.asarray(x, jnp.int32) for x in (drafts, base, sampling)]
    for search, want in wanted.items():
        many = jax.vmap(lambda s, n, b, m, search=search: choose(s, n, costs, b, m, search=search))
        np.testing.assert_array_equal(many(jnp.asarray(survival, jnp.float32), *numbers), want)


def budget_is_predictable(lib):
    """The trimmer spends what the previous round's survival was worth, on this round's best slots of active rows.

    Step times 1, 2, 2.22 for 0, 1, 2 drafts: survival (.8, .72) is worth a budget of 2, (.8, 0) none. Were the budget
    this round's, position 2 would decide whether position 1 is verified.
    """
    policies = lib.policies
    costs = lib.costs.cost_table(np.arange(1, 4), np.array([1.0, 2.0, 2.22]))
    policy, drafts = policies.trimmer(costs), jnp.asarray([2], jnp.int32)
    rich, poor = np.float32([[0.8, 0.72]]), np.float32([[0.8, 0.0]])

    @quick_jit
    def compiled(state, survival, active):
        return policy.decide(state, policies.PolicyInputs(num_drafts=drafts, survival=survival, active=active[None]))

    def decide(state, survival, active=True):
        n, state = compiled(state, survival, np.asarray(active))
        return n.item(), state

    for past, budget in ((rich, 2), (poor, 0)):
        first, state = decide(policy.init(), past)
        assert first == 2  # everything, before anything is known
        for now in (rich, poor):
            assert decide(state, now)[0] == budget
    assert decide(policy.init(), rich, active=False)[0] == 0


# ----------------------------------------------------------------------------------------------------- the loop

BATCH, LENGTH = 20_000, 3
TARGET = np.array([[0.5, 0.5], [0.3, 0.7]])
DRAFT = np.array([[0.2, 0.8], [0.6, 0.4]])


def _decode(lib, policy, rule, *, target=TARGET, draft=DRAFT, length=LENGTH, rounds=None, eos_token=None, key=None):
    """Decodes BATCH requests from token 0 over bigram tables of two tokens; the final state and every round's info."""
    target, draft = _logits(target), _logits(draft)

    def model(state, tokens, positions, num_tokens):  # rows beyond num_tokens hold something else altogether
        real = jnp.arange(tokens.shape[1])[None, :] < num_tokens[:, None]
        return jnp.where(real[:, :, None], target[tokens], jnp.asarray([[[-9.0, 0.0]]])), state

    def propose(state, context, draw):
        token = jnp.take_along_axis(context.tokens, context.lengths[:, None] - 1, axis=1)[:, 0]
        tokens, rows = [], []
        for index in range(WIDTH):
            rows.append(draft[token])
            token = draw(rows[-1], jnp.asarray(index, jnp.int32))
            tokens.append(token)
        return jnp.stack(tokens, axis=1), jnp.stack(rows, axis=1), state

    drafter = lib.drafting.Drafter(lambda state, prompts, lengths: state, propose, "autoregressive")
    options = {"num_draft_tokens": WIDTH, "max_new_tokens": length, "eos_token": eos_token}
    loop = lib.decode.decoder(model, drafter, policy=policy, rule=rule, **options)

    @quick_jit
    def init(key):
        return loop.init(key, jnp.zeros((BATCH, 1), jnp.int32), jnp.ones((BATCH,), jnp.int32), (), ())

    state, step, infos = init(jax.random.key(7) if key is None else key), quick_jit(loop.step), []
    for _ in range(2 * length if rounds is None else rounds):
        state, info = step(state)
        infos.append(info)
        if np.asarray(state.finished).all():
            break
    return state, infos


def drafts_are_not_drawn_twice(lib):
    """p = q = (.5, .5), standard rule; round 1 verifies nothing, round 2 verifies iff round 1's x_2 was token 0.

    With drafts keyed by position alone round 2 draws that very x_2 again, and token 0 comes with probability .75.
    """

    def decide(state, inputs):
        n = jnp.where(state["verify"], inputs.num_drafts, 0)
        return n, {"verify": inputs.draft_tokens[:, 1] == 0}

    policy = lib.policies.nothing()._replace(init=lambda: {"verify": jnp.zeros((BATCH,), jnp.bool_)}, decide=decide)
    half = np.full((2, 2), 0.5)
    state, infos = _decode(lib, policy, "standard", target=half, draft=half, length=4, rounds=2)
    np.testing.assert_array_equal(infos[0].num_committed, 1)
    assert set(np.unique(infos[1].num_verified)) == {0, 2}
    assert chi_square(np.bincount(np.asarray(state.tokens[:, 2])), [0.5, 0.5]).passed


def _sequences_follow_the_target(lib, policy, rule):
    """Decoded sequences have the target's law, which a fault of 4 percent would not pass, and the right length."""
    sequences = np.array(list(itertools.product(range(2), repeat=LENGTH)))
    before = np.concatenate([0 * sequences[:, :1], sequences[:, :-1]], axis=1)
    state, _ = _decode(lib, policy, rule)
    np.testing.assert_array_equal(state.positions, 1 + LENGTH)
    counts = np.bincount(np.asarray(state.tokens[:, 1:]) @ np.array([4, 2, 1]), minlength=len(sequences))
    test = chi_square(counts, TARGET[before, sequences].prod(axis=1))
    assert test.passed, test
    assert test.detectable_tv < 0.04


def sequences_of_the_standard_rule(lib):
    """Decoding with one of two drafts verified has the target's law."""
    _sequences_follow_the_target(lib, lib.policies.fixed(1), "standard")


def sequences_of_the_coupled_rule(lib):
    """Decoding with everything verified has the target's law."""
    _sequences_follow_the_target(lib, lib.policies.everything(), "coupled")


def sequences_of_the_deferred_rule(lib):
    """Decoding with nothing verified but what the free row tests has the target's law."""
    _sequences_follow_the_target(lib, lib.policies.nothing(), "deferred")


def deferred_loop_is_bitwise(lib):
    """Under the deferred rule the loop's tokens are bit for bit those of verifying everything.

    Both in one batch, of which the second half repeats the keys of the first and verifies nothing.
    """
    half = BATCH // 2
    decide = lambda state, inputs: (jnp.where(jnp.arange(BATCH) < half, inputs.num_drafts, 0), state)  # noqa: E731
    keys = jnp.tile(jax.random.split(jax.random.key(8), half), 2)
    policy = lib.policies.everything()._replace(decide=decide)
    state, _ = _decode(lib, policy, "deferred", length=5, key=keys)
    assert state.finished.all()
    counts = state.statistics
    assert not counts.verified[half:].any() and counts.verified[:half].any()
    np.testing.assert_array_equal(state.tokens[:half], state.tokens[half:])
    np.testing.assert_array_equal(counts.drafted[:half], counts.drafted[half:])


def labels_stop_at_the_end(lib):
    """Target and draft alternate 0 1 0 1; token 1 ends a request: it is emitted and labelled, nothing behind it is."""
    swap = np.eye(2)[::-1]
    state, infos = _decode(lib, lib.policies.everything(), "coupled", target=swap, draft=swap, eos_token=1)
    assert len(infos) == 1 and state.finished.all()
    np.testing.assert_array_equal(infos[0].result.num_accepted, 2)
    np.testing.assert_array_equal(state.tokens, np.broadcast_to([0, 1, -1, -1], state.tokens.shape))
    np.testing.assert_array_equal(infos[0].labels.observed, np.broadcast_to([True, False], (BATCH, 2)))


KILLS = {
    function.__name__: function
    for function in (
        exact_law_of_verification,
        counts_and_padding,
        counts_out_of_range_are_clamped,
        an_impossible_draft_leaves_the_target_law,
        noise_belongs_to_the_token,
        draws_follow_the_weights,
        carried_drafts_are_the_untested_ones,
        deferred_is_bitwise,
        labels_equal_a_walk,
        survival_is_a_monotone_product,
        allocation_equals_brute_force,
        budget_equals_exhaustive_search,
        budget_is_predictable,
        drafts_are_not_drawn_twice,
        sequences_of_the_standard_rule,
        sequences_of_the_coupled_rule,
        sequences_of_the_deferred_rule,
        deferred_loop_is_bitwise,
        labels_stop_at_the_end,
    )
}
