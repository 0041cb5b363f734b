"""Kill functions of the mutation test: what the trimmer and the decoding loop must satisfy. See `tests.kills`.

Laws of the loop are tested on samples, with the library's own noise.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from tests.kills import WIDTH, as_logits, quick_jit
from tests.laws import chi_square

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
    target, draft = as_logits(target), as_logits(draft)

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


KILLS = (
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
