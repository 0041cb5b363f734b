"""Survival: monotone in floats, exact against float64, causal bit for bit."""

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from specav.survival import survival_probabilities, valid_slots

B, K = 3, 6
survive = jax.jit(survival_probabilities)
# Any float32 bit pattern that is not a quiet surprise: NaN, infinities, values outside [0, 1].
anything = hnp.arrays(np.float32, (B, K), elements=st.floats(width=32, allow_nan=True, allow_infinity=True))
lengths = hnp.arrays(np.int32, (B,), elements=st.integers(-2, K + 3))


def reference(acceptance, num_drafts):
    """Loops in float64."""
    out = np.zeros(acceptance.shape)
    for b in range(acceptance.shape[0]):
        product = smallest = 1.0
        for i in range(min(max(int(num_drafts[b]), 0), acceptance.shape[1])):
            a = float(acceptance[b, i])
            product *= 0.0 if np.isnan(a) else min(max(a, 0.0), 1.0)
            smallest = min(smallest, product)
            out[b, i] = smallest
    return out


@given(anything, lengths)
def test_equals_float64_reference_and_is_monotone(acceptance, num_drafts):
    got = np.asarray(survive(jnp.asarray(acceptance), jnp.asarray(num_drafts)))
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, reference(acceptance, num_drafts), rtol=1e-6, atol=1e-37)
    assert np.all(got[:, 1:] <= got[:, :-1]) and np.all((got >= 0) & (got <= 1))
    assert not np.any(np.signbit(got))


@given(anything, lengths, st.integers(0, K - 1), st.floats(width=32))
def test_reads_no_later_position(acceptance, num_drafts, position, value):
    changed = acceptance.copy()
    changed[:, position] = value
    before = np.asarray(survive(jnp.asarray(acceptance), jnp.asarray(num_drafts)))
    after = np.asarray(survive(jnp.asarray(changed), jnp.asarray(num_drafts)))
    np.testing.assert_array_equal(before[:, :position].view(np.int32), after[:, :position].view(np.int32))


def test_monotone_where_the_plain_product_is_not_exact():
    # Long rows of values that round: the scan multiplies in another order at every position.
    rng = np.random.default_rng(0)
    acceptance = 1 - rng.uniform(0, 3e-7, (200, 33)).astype(np.float32)
    got = np.asarray(survive(jnp.asarray(acceptance), jnp.full((200,), 33, jnp.int32)))
    assert np.all(got[:, 1:] <= got[:, :-1])
    np.testing.assert_allclose(got, np.cumprod(acceptance.astype(np.float64), axis=1), rtol=4e-6)


def test_by_hand():
    acceptance = jnp.array([[0.5, 0.5, 1.5], [np.nan, 1.0, 1.0], [-1.0, 1.0, 1.0], [1.0, 0.25, 0.5]], jnp.float32)
    got = survival_probabilities(acceptance, jnp.array([3, 3, 3, 2]))
    np.testing.assert_array_equal(got, [[0.5, 0.25, 0.25], [0, 0, 0], [0, 0, 0], [1.0, 0.25, 0]])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_dtypes_and_single_slot(dtype):
    got = survival_probabilities(jnp.full((1, 1), 0.5, dtype), jnp.ones((1,), jnp.int32))
    assert got.dtype == jnp.float32 and got.shape == (1, 1) and float(got[0, 0]) == 0.5


def test_vmap_and_scan():
    acceptance = jax.random.uniform(jax.random.key(0), (4, B, K))
    num_drafts = jnp.array([[0, 3, 6]] * 4)
    mapped = jax.vmap(survival_probabilities)(acceptance, num_drafts)
    _, scanned = jax.lax.scan(lambda c, x: (c, survival_probabilities(*x)), 0, (acceptance, num_drafts))
    for i in range(4):
        want = np.asarray(survive(acceptance[i], num_drafts[i]))
        np.testing.assert_allclose(mapped[i], want, rtol=1e-6)
        np.testing.assert_allclose(scanned[i], want, rtol=1e-6)


def test_valid_slots():
    np.testing.assert_array_equal(valid_slots(jnp.array([0, 2, 9]), 3), [[0, 0, 0], [1, 1, 0], [1, 1, 1]])
    assert valid_slots(jnp.array(1), 2).tolist() == [True, False]


@pytest.mark.usefixtures("own_checks")
def test_errors():
    ones = jnp.ones((B, K))
    with pytest.raises(ValueError, match=r"acceptance: expected shape \[B, K\], got \[6\]"):
        survival_probabilities(ones[0], jnp.ones((B,), jnp.int32))
    with pytest.raises(TypeError, match="acceptance: expected a float dtype"):
        survival_probabilities(ones.astype(jnp.int32), jnp.ones((B,), jnp.int32))
    with pytest.raises(ValueError, match=r"num_drafts: expected shape \[B=3\], got \[2\]"):
        survival_probabilities(ones, jnp.ones((2,), jnp.int32))
    with pytest.raises(TypeError, match="num_drafts: expected an integer dtype"):
        survival_probabilities(ones, jnp.ones((B,)))
    with pytest.raises(TypeError, match="num_positions"):
        valid_slots(jnp.ones((B,), jnp.int32), jnp.ones(()))  # type: ignore[arg-type]
