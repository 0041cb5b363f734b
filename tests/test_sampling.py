"""Temperature, top-k and top-p, in this order; laws of logits with any masking."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from specav.sampling import SamplingParams, law, process_logits, token_probability

LOGITS = hnp.arrays(np.float32, (2, 6), elements=st.sampled_from([-np.inf, np.nan, -30.0, -1.5, 0.0, 0.25, 2.0, 31.0]))


def reference(row, temperature, top_k, top_p):
    """float64, one row: which tokens stay and with which probability."""
    z = np.where(np.isnan(row), -np.inf, row.astype(np.float64))
    if temperature == 0:
        return np.eye(len(z))[np.argmax(z)]
    z = z / temperature
    keep = np.ones(len(z), bool)
    if top_k is not None and top_k >= 1:
        keep &= z >= np.sort(z)[::-1][min(top_k, len(z)) - 1]
    if top_p is not None and top_p < 1:
        weights = np.where(keep, np.exp(z - z.max()), 0)
        probs = weights / weights.sum()
        order = np.argsort(-probs, kind="stable")
        before = np.cumsum(probs[order]) - probs[order]
        number = max(int((before < top_p - 1e-7).sum()), 1)
        keep &= z >= z[order[number - 1]]
    weights = np.where(keep, np.exp(z - z.max()), 0)
    return weights / weights.sum()


@given(
    LOGITS,
    st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    st.sampled_from([None, 0, 1, 2, 6, 99]),
    st.sampled_from([None, 0.0, 0.3, 0.7, 0.95, 1.0, 1.5]),
)
def test_process_logits_agrees_with_a_float64_reference(logits, temperature, top_k, top_p):
    logits[:, 0] = 0.1  # a row without any token names no law
    result = law(process_logits(jnp.asarray(logits), SamplingParams(temperature, top_k, top_p)))
    expected = np.stack([reference(row, temperature, top_k, top_p) for row in logits])
    np.testing.assert_allclose(result, expected, atol=2e-6)


def test_the_order_is_temperature_first():
    logits = jnp.log(jnp.asarray([[0.6, 0.3, 0.1]]))
    kept = jnp.isfinite(process_logits(logits, SamplingParams(temperature=2.0, top_p=0.65)))
    # After the temperature the masses are .473, .334, .193: two tokens reach .65. Before it they were .6, .3: also
    # two; at .55 the two orders differ.
    assert kept.tolist() == [[True, True, False]]
    kept = jnp.isfinite(process_logits(logits, SamplingParams(temperature=2.0, top_p=0.55)))
    assert kept.tolist() == [[True, True, False]]
    kept = jnp.isfinite(process_logits(logits, SamplingParams(top_p=0.55)))
    assert kept.tolist() == [[True, False, False]]


def test_parameters_per_request_mix_greedy_and_sampled_rows():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(3, 2, 5)), jnp.bfloat16)
    params = SamplingParams(jnp.asarray([0.0, 1.0, 0.5]), jnp.asarray([0, 2, 0]), jnp.asarray([1.0, 1.0, 0.6]))
    mixed = law(process_logits(logits, params))
    for row, single in enumerate([(0.0, None, None), (1.0, 2, None), (0.5, None, 0.6)]):
        alone = law(process_logits(logits[row : row + 1], SamplingParams(*single)))
        np.testing.assert_array_equal(mixed[row], alone[0])


def test_ties_with_the_last_token_kept_are_kept():
    logits = jnp.zeros((1, 4)).at[0, 2].set(1.0)
    assert jnp.isfinite(process_logits(logits, SamplingParams(top_k=2))).all()
    assert jnp.isfinite(process_logits(logits, SamplingParams(top_p=0.5))).all()
    assert process_logits(jnp.zeros((1, 4)), SamplingParams(temperature=0)).tolist() == [[0.0, *[-np.inf] * 3]]


@given(LOGITS, st.integers(-2, 7))
def test_token_probability_is_the_law_at_the_token(logits, token):
    logits = jnp.asarray(logits)
    tokens = jnp.full((2,), token)
    expected = law(logits)[:, token] if 0 <= token < 6 else jnp.zeros(2)
    np.testing.assert_array_equal(token_probability(logits, tokens), expected)


def test_laws_of_extreme_rows():
    inf = jnp.inf
    rows = jnp.asarray([[-inf, -inf], [jnp.nan, 3.0], [inf, 0.0], [inf, inf], [-inf, -1e38], [3e38, -3e38]])
    expected = [[0, 0], [0, 1], [1, 0], [0.5, 0.5], [0, 1], [1, 0]]
    np.testing.assert_array_equal(law(rows), np.asarray(expected, np.float32))
    assert law(jnp.zeros((3, 1))).tolist() == [[1.0]] * 3


def test_law_of_a_large_vocabulary():
    logits = np.random.default_rng(1).normal(size=(2, 150_000)).astype(np.float32) * 4
    weights = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    expected = weights / weights.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(law(jnp.asarray(logits)), expected, rtol=5e-6, atol=1e-37)


def test_bad_parameters_are_refused(own_checks):
    logits = jnp.zeros((2, 3, 5))
    with pytest.raises(ValueError, match=r"temperature: expected a scalar or a shape that begins \[2, 3\], got \[3\]"):
        process_logits(logits, SamplingParams(temperature=jnp.ones(3)))
    with pytest.raises(TypeError, match="top_k: expected an integer dtype"):
        process_logits(logits, SamplingParams(top_k=jnp.ones(2)))
    with pytest.raises(TypeError, match="logits: expected a float dtype, got int32"):
        process_logits(jnp.zeros((2, 3), jnp.int32), SamplingParams())
