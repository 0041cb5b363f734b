"""Budget and allocation against brute force, under ties, for every shape of cost; causality bit for bit."""

import itertools

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from specav.costs import cost_table, flat_costs, linear_costs
from specav.survival import survival_probabilities
from specav.trimmer import allocate_budget, allocate_slots, choose_budget, count_prefix

B, K = 4, 3
METHODS = ("sort", "pairwise")
allocate = {m: jax.jit(lambda s, b, n, m=m: allocate_budget(s, b, n, method=m)) for m in METHODS}
mask = {m: jax.jit(lambda s, b, n, m=m: allocate_slots(s, b, n, method=m)) for m in METHODS}
choose = jax.jit(choose_budget)

# Few values, so that most examples have ties; products of them tie too.
few = st.sampled_from([0.0, 0.25, 0.5, 0.5, 1.0])
acceptances = st.one_of(
    hnp.arrays(np.float32, (B, K), elements=few),
    hnp.arrays(np.float32, (B, K), elements=st.floats(0, 1, width=32)),
)
lengths = hnp.arrays(np.int32, (B,), elements=st.integers(-1, K + 2))
budgets = st.integers(-3, B * K + 3)
COSTS = {
    "flat": flat_costs(1.0),
    "linear": linear_costs(1.0, 0.1, draft_base=0.1, draft_per_request=0.05),
    "steep": linear_costs(0.1, 1.0),
    "stairs": cost_table([2, 4, 6, 9], [1.0, 1.3, 1.4, 2.5], draft_sizes=[1, 4], draft_times=[0.1, 0.3]),
    "plateau": cost_table([8], [1.0]),
}


def slots_in_order(survival, num_drafts):
    """All valid slots by (-S, position, request), with Python's exact comparisons."""
    num_drafts = np.clip(num_drafts, 0, survival.shape[1])
    slots = [(-float(survival[r, i]), i, r) for r in range(survival.shape[0]) for i in range(num_drafts[r])]
    return sorted(slots)


def reference_allocation(survival, budget, num_drafts):
    counts = np.zeros(survival.shape[0], np.int32)
    for _, _, r in slots_in_order(survival, num_drafts)[: max(budget, 0)]:
        counts[r] += 1
    return counts


def reference_rates(survival, num_drafts, costs, base, sampling):
    """The objective at every budget in float64, on the cost table as stored."""

    def lookup(sizes, times, slope, n):
        index = int(np.searchsorted(sizes, n))
        return times[min(index, len(sizes) - 1)] + slope * max(n - sizes[-1], 0)

    table = [None if leaf is None else np.asarray(leaf, np.float64) for leaf in costs]
    requests = int(np.sum(num_drafts > 0))
    drafting = 0.0 if table[3] is None or not requests else lookup(*table[3:], requests)
    best = [-s for s, _, _ in slots_in_order(survival, num_drafts)]
    return np.array(
        [(sampling + sum(best[:b])) / (drafting + lookup(*table[:3], base + b)) for b in range(len(best) + 1)]
    )


def make_survival(acceptance, num_drafts):
    return np.asarray(survival_probabilities(jnp.asarray(acceptance), jnp.asarray(num_drafts)))


@pytest.mark.parametrize("method", METHODS)
@given(acceptance=acceptances, num_drafts=lengths, budget=budgets)
def test_allocation_equals_brute_force(method, acceptance, num_drafts, budget):
    survival = make_survival(acceptance, num_drafts)
    got = np.asarray(allocate[method](jnp.asarray(survival), jnp.asarray(budget), jnp.asarray(num_drafts)))
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, reference_allocation(survival, budget, num_drafts))
    total = np.clip(num_drafts, 0, K).sum()
    assert got.sum() == min(max(budget, 0), total)
    assert np.all((got >= 0) & (got <= np.clip(num_drafts, 0, K)))


def test_every_small_case_with_ties():
    """All survivals of 2 requests x 2 positions over three values, all lengths and budgets."""
    values = [0.0, 0.5, 1.0]
    rows = [r for r in itertools.product(values, repeat=2) if r[1] <= r[0]]
    cases = [
        (np.array(s, np.float32), b, np.array(n, np.int32))
        for s in itertools.product(rows, repeat=2)
        for b in range(-1, 6)
        for n in itertools.product(range(3), repeat=2)
    ]
    survival, budget, num_drafts = (np.stack(x) for x in zip(*cases))
    want = [reference_allocation(*case) for case in cases]
    for method in METHODS:
        many = jax.vmap(lambda s, b, n, m=method: allocate_budget(s, b, n, method=m))
        np.testing.assert_array_equal(many(survival, jnp.asarray(budget), jnp.asarray(num_drafts)), want)


# Raw bit patterns: NaN, infinities, both zeros, subnormal numbers, neighbours in the last bit.
hard = st.one_of(
    st.sampled_from(
        [0.0, -0.0, np.nan, np.inf, -np.inf, 1e-45, 3e-45, 1e-38, -1e-45, 0.5, np.nextafter(np.float32(0.5), 1)]
    ),
    st.floats(width=32, allow_nan=True, allow_infinity=True),
)


@given(hnp.arrays(np.float32, (B, K), elements=hard.map(np.float32)), lengths, budgets)
def test_any_floats_give_a_prefix_in_exact_order(scores, num_drafts, budget):
    clean = np.where(np.isnan(scores), -np.inf, scores).astype(np.float32)
    want = reference_allocation(np.minimum.accumulate(clean, axis=1), budget, num_drafts)
    for method in METHODS:
        got = allocate[method](jnp.asarray(scores), jnp.asarray(budget), jnp.asarray(num_drafts))
        np.testing.assert_array_equal(got, want)
        slots = mask[method](jnp.asarray(scores), jnp.asarray(budget), jnp.asarray(num_drafts))
        np.testing.assert_array_equal(slots, np.arange(K) < want[:, None])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_methods_agree_at_production_shapes(dtype):
    rng = np.random.default_rng(1)
    for _ in range(5):
        acceptance = jnp.asarray(rng.choice([0.5, 0.7, 0.9, 1.0], (32, 8)), dtype)
        num_drafts = jnp.asarray(rng.integers(0, 9, 32))
        survival = survival_probabilities(acceptance, num_drafts).astype(dtype)
        budget = int(rng.integers(0, 200))
        want = reference_allocation(np.asarray(survival.astype(jnp.float32)), budget, np.asarray(num_drafts))
        for method in METHODS:
            got = allocate[method](survival, jnp.asarray(budget), num_drafts)
            np.testing.assert_array_equal(got, want)


def test_float64_order_is_kept():
    with jax.enable_x64(True):
        survival = jnp.asarray(np.array([[0.5, 0.1], [np.nextafter(0.5, 1), 0.1]]))
        assert survival.dtype == jnp.float64
        for method in METHODS:
            got = allocate_budget(survival, 1, jnp.array([2, 2], jnp.int32), method=method)
            assert got.tolist() == [0, 1]


@given(
    acceptances,
    lengths,
    budgets,
    st.integers(0, B - 1),
    st.integers(1, K - 1),
    hnp.arrays(np.float32, (K,), elements=few),
)
def test_a_decision_reads_no_later_position_of_its_request(acceptance, num_drafts, budget, request, position, values):
    """With the budget given, flipping positions >= i of a request moves no decision about positions < i of it."""
    changed = acceptance.copy()
    changed[request, position:] = values[position:]
    for method in METHODS:
        run = allocate[method]
        before = run(jnp.asarray(make_survival(acceptance, num_drafts)), jnp.asarray(budget), jnp.asarray(num_drafts))
        after = run(jnp.asarray(make_survival(changed, num_drafts)), jnp.asarray(budget), jnp.asarray(num_drafts))
        assert min(int(before[request]), position) == min(int(after[request]), position)


def test_ties_by_hand():
    survival = jnp.array([[0.5, 0.5], [0.5, 0.25], [0.75, 0.5]])
    n = jnp.array([2, 2, 2])
    want = {1: [0, 0, 1], 2: [1, 0, 1], 3: [1, 1, 1], 4: [2, 1, 1], 5: [2, 1, 2], 6: [2, 2, 2]}
    for method, (budget, counts) in itertools.product(METHODS, want.items()):
        assert allocate[method](survival, jnp.asarray(budget), n).tolist() == counts


@pytest.mark.parametrize("name", COSTS)
@given(acceptance=acceptances, num_drafts=lengths, base=st.integers(0, 9), sampling=st.integers(0, 5))
def test_budget_equals_exhaustive_search(name, acceptance, num_drafts, base, sampling):
    survival = make_survival(acceptance, num_drafts)
    rates = reference_rates(survival, num_drafts, COSTS[name], base, sampling)
    got = choose(jnp.asarray(survival), jnp.asarray(num_drafts), COSTS[name], jnp.asarray(base), jnp.asarray(sampling))
    assert got.dtype == jnp.int32
    want = int(np.argmax(rates))
    if int(got) != want:
        assert abs(rates[int(got)] - rates[want]) <= 1e-6 * rates[want]


def test_no_vector_of_prefixes_beats_budget_and_allocation():
    """Throughput of what is really allocated, against every possible vector of prefixes."""
    rng = np.random.default_rng(3)
    times = [1.0, 1.0, 1.3, 1.3, 1.4, 1.4, 2.5, 2.5, 2.5]  # 1 .. 9 tokens
    costs = cost_table(range(1, 10), times)
    for _ in range(20):
        num_drafts = rng.integers(0, 3, 3)
        survival = make_survival(rng.uniform(0, 1, (3, 2)).astype(np.float32), num_drafts)

        def rate(take, survival=survival):
            gain = sum(survival[r, :n].astype(np.float64).sum() for r, n in enumerate(take))
            return (3 + gain) / times[3 + sum(take) - 1]

        args = jnp.asarray(survival), jnp.asarray(num_drafts)
        chosen = allocate_budget(args[0], choose(*args, costs, jnp.asarray(3), jnp.asarray(3)), args[1])
        best = max(rate(take) for take in itertools.product(*(range(n + 1) for n in num_drafts)))
        assert rate(chosen.tolist()) >= best * (1 - 1e-6)


def test_budget_by_hand():
    # One request, S = .8, .72; step times 1, 2, 2.22 for 1, 2, 3 tokens: rates 1, .9, 1.135 -> 2.
    # With S_2 = 0: 1, .9, .81 -> 0. This is the live argmax that bends the law.
    costs = cost_table([1, 2, 3], [1.0, 2.0, 2.22])
    two = jnp.array([2])
    assert int(choose_budget(jnp.array([[0.8, 0.72]]), two, costs, 1, 1)) == 2
    assert int(choose_budget(jnp.array([[0.8, 0.0]]), two, costs, 1, 1)) == 0
    # Ties go to the smallest budget: a slot of survival 0 is free but worthless.
    assert int(choose_budget(jnp.array([[1.0, 0.0]]), two, flat_costs(1.0), 1, 1)) == 1
    assert int(choose_budget(jnp.array([[1.0, 1.0]]), two, linear_costs(0.0, 1.0), 1, 1)) == 0
    # Drafting time is part of the step: sunk costs make verification worth more.
    dear = linear_costs(1.0, 1.0, draft_per_request=10.0)
    assert int(choose_budget(jnp.array([[0.6, 0.5]]), two, linear_costs(1.0, 1.0), 1, 1)) == 1
    assert int(choose_budget(jnp.array([[0.6, 0.5]]), two, dear, 1, 1)) == 2
    assert int(choose_budget(jnp.array([[0.6, 0.5]]), two, dear, 1, 1, num_drafting=0)) == 1
    # Nothing drafted, nothing to choose; NaN is worth nothing.
    assert int(choose_budget(jnp.array([[0.9, 0.9]]), jnp.array([0]), flat_costs(1.0), 1, 1)) == 0
    assert int(choose_budget(jnp.array([[jnp.nan, jnp.nan]]), two, flat_costs(1.0), 1, 1)) == 0


def test_compiles_once_and_stays_on_the_device():
    traces = []

    @jax.jit
    def trim(acceptance, num_drafts, costs, base):
        traces.append(1)
        survival = survival_probabilities(acceptance, num_drafts)
        budget = choose_budget(survival, num_drafts, costs, base, base)
        return allocate_budget(survival, budget, num_drafts)

    rng = np.random.default_rng(0)
    arguments = lambda: (  # noqa: E731
        jnp.asarray(rng.uniform(0, 1, (8, 5)), jnp.float32),
        jnp.asarray(rng.integers(0, 6, 8), jnp.int32),
        COSTS["stairs"],
        jnp.asarray(rng.integers(1, 9), jnp.int32),
    )
    for _ in range(20):
        trim(*arguments())
    assert len(traces) == 1
    text = str(jax.make_jaxpr(trim)(*arguments()))
    assert "callback" not in text and "outfeed" not in text


@pytest.mark.parametrize("method", METHODS)
def test_vmap_scan_and_single_slots(method):
    rng = np.random.default_rng(5)
    acceptance = jnp.asarray(rng.choice([0.5, 1.0], (6, B, K)), jnp.float32)
    num_drafts = jnp.asarray(rng.integers(0, K + 1, (6, B)), jnp.int32)
    budget = jnp.asarray(rng.integers(0, B * K, 6), jnp.int32)

    def one(a, n, b):
        return allocate_budget(survival_probabilities(a, n), b, n, method=method)

    single = jax.jit(one)
    want = [single(a, n, b) for a, n, b in zip(acceptance, num_drafts, budget)]
    np.testing.assert_array_equal(jax.vmap(one)(acceptance, num_drafts, budget), want)
    _, scanned = jax.lax.scan(lambda c, x: (c, one(*x)), 0, (acceptance, num_drafts, budget))
    np.testing.assert_array_equal(scanned, want)
    assert allocate_budget(jnp.ones((1, 1)), 1, jnp.array([1]), method=method).tolist() == [1]
    assert allocate_budget(jnp.ones((1, 1)), 1, jnp.array([0]), method=method).tolist() == [0]


def test_count_prefix_stops_at_the_first_gap():
    slots = jnp.array([[True, False, True], [True, True, True], [False, True, True]])
    assert count_prefix(slots).tolist() == [1, 3, 0]


@pytest.mark.usefixtures("own_checks")
def test_errors():
    ones, n = jnp.ones((B, K)), jnp.ones((B,), jnp.int32)
    with pytest.raises(ValueError, match=r"num_drafts: expected shape \[B=4\], got \[3\]"):
        allocate_budget(ones, 1, n[:3])
    with pytest.raises(TypeError, match="budget: expected an integer dtype, got float32"):
        allocate_budget(ones, jnp.ones(()), n)
    with pytest.raises(ValueError, match=r"budget: expected shape \[\], got \[4\]"):
        allocate_budget(ones, n, n)
    with pytest.raises(ValueError, match="method: expected one of 'sort', 'pairwise', got 'topk'"):
        allocate_budget(ones, 1, n, method="topk")
    with pytest.raises(ValueError, match=r"survival: expected shape \[B, K\], got \[3\]"):
        choose_budget(ones[0], n, flat_costs(1.0), 1, 1)
    with pytest.raises(ValueError, match=r"num_sampling: expected shape \[\], got \[4\]"):
        choose_budget(ones, n, flat_costs(1.0), 1, n)
    with pytest.raises(TypeError, match="num_base_tokens: expected an integer dtype"):
        choose_budget(ones, n, flat_costs(1.0), 1.5, 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="slots: expected bool"):
        count_prefix(ones)
