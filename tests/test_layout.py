"""Flattened layouts: round trips, what an engine's own loop would build, and padding that belongs to nobody."""

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from specav import layout
from tests.helpers import assert_stays_on_device, count_traces

B, K = 4, 3
lengths = hnp.arrays(np.int32, (B,), elements=st.integers(0, K))
tails = st.sampled_from([(), (5,), (2, 3)])
flatten = jax.jit(layout.flatten_drafts, static_argnames="num_tokens")
unflatten = jax.jit(layout.unflatten_drafts, static_argnames="num_positions")
flatten_target = jax.jit(layout.flatten_target_rows, static_argnames="num_tokens")
unflatten_target = jax.jit(layout.unflatten_target_rows, static_argnames="num_positions")


def numbered(shape):
    """Every entry another number, none of them a fill value."""
    return 1 + np.arange(np.prod(shape), dtype=np.int32).reshape(shape)


def engine_rows(values, counts):
    """What an engine has: the real rows end to end."""
    return np.concatenate([values[b, : counts[b]] for b in range(len(counts))])


@given(lengths, tails, st.sampled_from([1, 5, B * K, B * K + 4]), st.sampled_from([-1, 0]))
def test_drafts_round_trip(num_drafts, tail, size, fill):
    values = numbered((B, K, *tail))
    want, total = engine_rows(values, num_drafts), int(num_drafts.sum())
    flat, where = flatten(jnp.asarray(values), jnp.asarray(num_drafts), num_tokens=size, fill=fill)
    kept = min(total, size)
    np.testing.assert_array_equal(flat[:kept], want[:kept])
    assert np.all(np.asarray(flat[kept:]) == fill)
    assert bool(where.overflow) == (total > size)
    owners = np.repeat(np.arange(B), num_drafts)
    np.testing.assert_array_equal(where.requests[:kept], owners[:kept])
    assert np.all(np.asarray(where.requests[kept:]) == B)
    np.testing.assert_array_equal(where.positions[:kept], np.concatenate([np.arange(n) for n in num_drafts])[:kept])
    np.testing.assert_array_equal(where.positions[kept:], np.arange(size - kept))
    np.testing.assert_array_equal(where.starts, np.concatenate([[0], np.cumsum(num_drafts)]))

    # Garbage in the padding never comes back.
    dirty = flat.at[kept:].set(-77)
    back = unflatten(dirty, jnp.asarray(num_drafts), num_positions=K, fill=fill)
    real = (np.arange(K) < num_drafts[:, None]) & (
        np.cumsum(num_drafts)[:, None] - num_drafts[:, None] + np.arange(K) < size
    )
    np.testing.assert_array_equal(back, np.where(real.reshape(real.shape + (1,) * len(tail)), values, fill))


@given(lengths, hnp.arrays(np.bool_, (B,)), st.booleans())
def test_target_rows_round_trip(num_verified, active, everyone):
    values = numbered((B, K + 1, 2))
    counts = num_verified + 1 if everyone else np.where(active, num_verified + 1, 0)
    mask = None if everyone else jnp.asarray(active)
    flat, where = flatten_target(jnp.asarray(values), jnp.asarray(num_verified), active=mask)
    assert flat.shape == (B * (K + 1), 2) and not bool(where.overflow)
    np.testing.assert_array_equal(flat[: counts.sum()], engine_rows(values, counts))
    back = unflatten_target(flat, jnp.asarray(num_verified), num_positions=K, active=mask)
    real = np.arange(K + 1) < counts[:, None]
    np.testing.assert_array_equal(back, np.where(real[..., None], values, 0))


@given(lengths)
def test_segment_sums_leave_padding_out(num_drafts):
    values = numbered((B, K))
    flat, where = flatten(jnp.asarray(values), jnp.asarray(num_drafts), fill=1_000_000)
    sums = jax.ops.segment_sum(flat, where.requests, num_segments=B + 1)[:B]
    np.testing.assert_array_equal(sums, (values * (np.arange(K) < num_drafts[:, None])).sum(axis=1))


@given(lengths)
def test_bonus_rows_join(num_verified):
    """Splitting n + 1 rows into n and a bonus, as engines do, and joining them gives the rows back."""
    values = numbered((B, K + 1, 2))
    bonus = values[np.arange(B), num_verified]
    got = np.asarray(layout.with_bonus_rows(jnp.asarray(values[:, :K]), jnp.asarray(bonus), jnp.asarray(num_verified)))
    for b, n in enumerate(num_verified):
        np.testing.assert_array_equal(got[b, : n + 1], values[b, : n + 1])


def test_by_hand():
    tokens = jnp.array([[7, 8, -1], [-1, -1, -1], [9, 10, 11]])
    flat, where = layout.flatten_drafts(tokens, jnp.array([2, 0, 3]), num_tokens=7, fill=-1)
    assert flat.tolist() == [7, 8, 9, 10, 11, -1, -1]
    assert where.requests.tolist() == [0, 0, 2, 2, 2, 3, 3]
    assert where.positions.tolist() == [0, 1, 0, 1, 2, 0, 1]
    assert where.starts.tolist() == [0, 2, 2, 5]
    back = layout.unflatten_drafts(flat, jnp.array([2, 0, 3]), 3, fill=-1)
    np.testing.assert_array_equal(back, tokens)
    # Out-of-range counts are clamped.
    flat, where = layout.flatten_drafts(tokens, jnp.array([-2, 0, 9]), fill=-1)
    assert flat.tolist() == [9, 10, 11] + [-1] * 6 and where.starts.tolist() == [0, 0, 0, 3]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.bool_, jnp.int8])
def test_any_dtype_and_single_slots(dtype):
    values = jnp.ones((1, 1, 4), dtype)
    flat, _ = layout.flatten_drafts(values, jnp.array([1]), num_tokens=2)
    assert flat.dtype == dtype and flat.shape == (2, 4)
    assert layout.unflatten_drafts(flat, jnp.array([1]), 1).dtype == dtype
    empty, where = layout.flatten_drafts(values, jnp.array([0]), num_tokens=2)
    assert not bool(jnp.any(empty)) and where.requests.tolist() == [1, 1]


def test_compiles_once_stays_on_the_device_and_maps():
    def both(values, counts):
        flat, where = layout.flatten_drafts(values, counts, num_tokens=10)
        return layout.unflatten_drafts(flat, counts, K), where

    step, traces = count_traces(both)
    rng = np.random.default_rng(0)
    values = jnp.asarray(numbered((B, K)))
    counts = jnp.asarray(rng.integers(0, K, (20, B)), jnp.int32)
    want = [step(values, n)[0] for n in counts]
    assert len(traces) == 1
    assert_stays_on_device(both, values, counts[0])
    np.testing.assert_array_equal(jax.vmap(both, in_axes=(None, 0))(values, counts)[0], want)
    _, (scanned, _) = jax.lax.scan(lambda c, n: (c, both(values, n)), 0, counts)
    np.testing.assert_array_equal(scanned, want)


@pytest.mark.usefixtures("own_checks")
def test_errors():
    values, n = jnp.ones((B, K)), jnp.ones((B,), jnp.int32)
    with pytest.raises(ValueError, match=r"values: expected shape \[B=4, K, ...\], got \[3, 3\]"):
        layout.flatten_drafts(values[:3], n)
    with pytest.raises(TypeError, match="num_drafts: expected an integer dtype"):
        layout.flatten_drafts(values, n.astype(jnp.float32))
    with pytest.raises(ValueError, match="num_tokens: expected an int of at least 1, got 0"):
        layout.flatten_drafts(values, n, num_tokens=0)
    with pytest.raises(TypeError, match="num_positions: expected a Python int"):
        layout.unflatten_drafts(values, n, jnp.asarray(3))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"rows: expected shape \[N, ...\] with N >= 1, got \[\]"):
        layout.unflatten_drafts(jnp.ones(()), n, K)
    with pytest.raises(ValueError, match=r"active: expected shape \[B=4\], got \[2\]"):
        layout.flatten_target_rows(values, n, active=jnp.ones((2,), jnp.bool_))
    with pytest.raises(ValueError, match=r"num_verified: expected shape \[B\], got \[4, 3\]"):
        layout.unflatten_target_rows(values, values.astype(jnp.int32), K)
    with pytest.raises(ValueError, match=r"bonus: expected float32 \[4\], got float32 \[3\]"):
        layout.with_bonus_rows(values, jnp.ones((3,)), n)
    with pytest.raises(ValueError, match=r"num_rows: expected shape \[B\], got \[\]"):
        layout.flat_layout(jnp.asarray(1), 3)
