"""Cost tables: stair-step, linear beyond, monotone; the measuring protocol under a clock of its own."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from specav.costs import CostTable, cost_table, draft_cost, flat_costs, linear_costs, measure, verify_cost

# Few lengths, because each is compiled anew.
entries = st.sampled_from([1, 2, 5]).flatmap(
    lambda n: st.lists(
        st.tuples(st.integers(1, 60), st.floats(1e-3, 10.0)), min_size=n, max_size=n, unique_by=lambda e: e[0]
    ).map(sorted)
)


def reference(sizes, times, n):
    """The documented rule in Python floats."""
    times = [max(times[: i + 1]) for i in range(len(times))]
    for size, cost in zip(sizes, times):
        if n <= size:
            return cost
    if len(sizes) == 1:
        return times[0] * n / sizes[0]
    slope = (times[-1] - times[-2]) / (sizes[-1] - sizes[-2])
    return times[-1] + slope * (n - sizes[-1])


@given(entries)
def test_lookup_equals_the_rule_and_is_monotone(pairs):
    sizes, times = map(list, zip(*pairs))
    table = cost_table(sizes, times, draft_sizes=sizes, draft_times=times)
    n = np.arange(0, 130)
    got = np.asarray(verify_cost(table, jnp.asarray(n)))
    np.testing.assert_allclose(got, [reference(sizes, times, k) for k in n], rtol=1e-5)
    assert np.all(np.diff(got) >= 0) and np.all(got > 0)
    drafting = np.asarray(draft_cost(table, jnp.asarray(n)))
    assert drafting[0] == 0
    np.testing.assert_array_equal(drafting[1:], got[1:])


@given(st.lists(st.floats(1e-3, 10.0), min_size=3, max_size=3))
def test_linear_kind_interpolates(times):
    sizes = [3, 10, 40]
    table = cost_table(sizes, times, kind="linear")
    n = np.arange(3, 41)
    want = np.interp(n, sizes, np.maximum.accumulate(times))
    np.testing.assert_allclose(verify_cost(table, jnp.asarray(n)), want, rtol=1e-5)
    np.testing.assert_allclose(verify_cost(table, 50), reference(sizes, times, 50), rtol=1e-5)


def test_by_hand():
    table = cost_table([1, 4, 8], [1.0, 3.0, 2.0])  # 2.0 is noise: raised to 3
    assert [float(verify_cost(table, n)) for n in (0, 1, 2, 4, 5, 8, 20)] == [1, 1, 3, 3, 3, 3, 3]
    table = cost_table([2, 4], [1.0, 2.0])
    assert [float(verify_cost(table, n)) for n in (1, 3, 6)] == [1, 2, 3]
    assert float(verify_cost(cost_table([4], [2.0]), 8)) == 4
    assert float(draft_cost(table, 3)) == 0


def test_linear_and_flat():
    # A slope that float32 entries could not carry: 1e-7 a token on top of 10 seconds.
    table = linear_costs(10.0, 1e-7, draft_base=0.5, draft_per_request=0.25)
    np.testing.assert_allclose(verify_cost(table, 50_000_000), 15.0, rtol=1e-6)
    assert [float(draft_cost(table, r)) for r in (0, 1, 3)] == [0, 0.75, 1.25]
    flat = flat_costs(2.0)
    assert np.all(np.asarray(verify_cost(flat, jnp.arange(100))) == 2) and float(draft_cost(flat, 5)) == 0
    assert float(draft_cost(linear_costs(1.0, 0.0, draft_per_request=2.0), 3)) == 6


def test_is_a_pytree_for_jit_and_vmap():
    table = cost_table([1, 8], [1.0, 2.0], draft_sizes=[1], draft_times=[1.0])
    traces = []

    @jax.jit
    def cost(table, n):
        traces.append(1)
        return verify_cost(table, n) + draft_cost(table, n)

    for n in range(1, 9):
        assert float(cost(table, jnp.asarray(n))) == (1 if n == 1 else 2) + n
    assert len(traces) == 1
    tables = jax.tree.map(
        lambda *leaves: jnp.stack(leaves), table, cost_table([2, 4], [3.0, 5.0], draft_sizes=[1], draft_times=[1.0])
    )
    np.testing.assert_array_equal(jax.vmap(verify_cost, in_axes=(0, None))(tables, 3), [2, 5])
    assert isinstance(tables, CostTable)


class Machine:
    """A pretended machine: its clock moves when a size is run, by what the size costs plus a drift."""

    def __init__(self, costs, drift=0.0):
        self.now, self.costs, self.drift, self.calls = 0.0, costs, drift, []

    def run(self, size):
        # The first call of a size compiles, which takes ages.
        self.now += self.costs[size] + (1000.0 if size not in self.calls else 0.0) + self.drift * len(self.calls)
        self.calls.append(size)
        return jnp.zeros(())


def test_measure_leaves_compilation_out_and_cancels_drift():
    machine = Machine({1: 1.0, 4: 2.0, 16: 4.0}, drift=0.01)
    seen = []
    table = measure(
        machine.run,
        [1, 4, 16],
        repeats=10,
        warmup=1,
        clock=lambda: machine.now,
        progress=lambda *p: seen.append(p),
    )
    # Drift adds the same to every size (its mean over the run), so differences between sizes survive it.
    np.testing.assert_allclose(np.diff(table.times), [1.0, 2.0], atol=0.02)
    assert table.sizes.tolist() == [1, 4, 16]
    assert seen[-1] == (33, 33) and [s[0] for s in seen] == list(range(1, 34))
    assert machine.calls[:9] == [1, 4, 16, 1, 4, 16, 16, 4, 1]  # warm-up apart, then there and back


def test_measure_takes_medians_and_running_maximum():
    spikes = iter([1.0] * 2 + [50.0] + [1.0] * 100)
    now = [0.0]

    def fn(size):
        now[0] += (5.0 if size == 2 else 3.0) * next(spikes)

    table = measure(fn, [2, 3], repeats=5, warmup=1, clock=lambda: now[0])
    assert table.times.tolist() == [5.0, 5.0]


def test_measure_prepares_outside_the_clock_and_may_donate():
    prepared = []

    def prepare(size):
        prepared.append(size)
        return (jnp.ones((size, 8)), jnp.ones((8, 8)))

    fn = jax.jit(lambda x, w: x @ w, donate_argnums=0)
    table = measure(
        fn,
        [1, 64],
        prepare=prepare,
        repeats=3,
        draft_fn=lambda r: jnp.ones((r,)) * 2,
        draft_sizes=[1, 2],
    )
    assert len(prepared) == 2 * (2 + 3)
    times = np.asarray(table.times)
    assert np.all(times > 0) and times[1] >= times[0] and table.draft_sizes is not None
    assert float(draft_cost(table, 2)) > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], []), r"sizes: expected shape \[N\] with N >= 1"),
        (([1, 1], [1.0, 1.0]), "sizes: expected increasing ints"),
        (([0, 1], [1.0, 1.0]), "sizes: expected increasing ints"),
        (([1, 2], [1.0]), r"times: expected one per size, shape \[2\], got \[1\]"),
        (([1, 2], [1.0, 0.0]), "times: expected finite numbers > 0"),
        (([1, 2], [1.0, np.nan]), "times: expected finite numbers > 0"),
        (([1, 2], [1.0, np.inf]), "times: expected finite numbers > 0"),
        (([1, 2], [1.0, 1e-60]), "times: expected finite numbers > 0"),  # 0 in float32
        (([1, 2], [1.0, 1e60]), "times: expected finite numbers > 0"),
    ],
)
def test_table_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        cost_table(*arguments)
    if "expected shape" not in message:
        with pytest.raises(ValueError, match="draft_" + message):
            cost_table([1], [1.0], draft_sizes=arguments[0], draft_times=arguments[1])


@pytest.mark.usefixtures("own_checks")
def test_other_errors():
    table = flat_costs(1.0)
    with pytest.raises(TypeError, match="sizes: expected integers, got float64"):
        cost_table([1.5, 2.5], [1.0, 1.0])
    with pytest.raises(ValueError, match="draft_sizes, draft_times: expected both or neither"):
        cost_table([1], [1.0], draft_sizes=[1])
    with pytest.raises(ValueError, match="kind: expected one of 'stair', 'linear'"):
        cost_table([1], [1.0], kind="cubic")
    with pytest.raises(TypeError, match="num_tokens: expected an int"):
        verify_cost(table, jnp.ones(()))
    with pytest.raises(TypeError, match="num_requests: expected an int"):
        draft_cost(table, 1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="base, per_token: expected a finite sum > 0"):
        linear_costs(0.0, 0.0)
    with pytest.raises(ValueError, match="per_token: expected a number in"):
        linear_costs(1.0, -1.0)
    with pytest.raises(ValueError, match="repeats: expected an int of at least 1"):
        measure(jnp.ones, [1], repeats=0)
    with pytest.raises(ValueError, match="draft_fn, draft_sizes: expected both or neither"):
        measure(jnp.ones, [1], draft_fn=jnp.ones)
    with pytest.raises(ValueError, match="times: expected finite numbers > 0"):
        measure(jnp.ones, [1], repeats=1, clock=lambda: 1.0)
