"""Features against float64, within the tolerances the library promises."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import tests.reference_features as reference
from specav.features import FEATURES, DraftFeatures, draft_features, feature_class, stack_features
from tests.helpers import assert_stays_on_device

compute = jax.jit(draft_features, static_argnames="names")
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


def assert_accurate(logits, tokens=None, temperature=1.0):
    """Log-odds and margin within 1e-5 max(|ref|, .1); entropy and log_collision within a relative 1e-5."""
    got = compute(logits, tokens, temperature=temperature)
    want = reference.features(logits.astype(jnp.float32), tokens, temperature)
    for name, value in want.items():
        field = np.asarray(getattr(got, name))
        assert field.dtype == np.float32 and field.shape == value.shape
        error = np.abs(field.astype(np.float64) - value)
        if name in ("entropy", "log_collision"):
            allowed = np.maximum(1e-5 * np.abs(value), 1e-30)
        else:
            allowed = 1e-5 * np.maximum(np.abs(value), 0.1)
        worst = np.argmax(error - allowed)
        assert np.all(error <= allowed), (name, field.flat[worst], value.flat[worst])


@st.composite
def rows(draw, vocabulary):
    """One row of logits: ordinary, tied, masked, peaked, saturated, damaged."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    spread = draw(st.sampled_from([0.0, 1e-6, 0.01, 1.0, 5.0, 20.0, 80.0]))
    z = rng.standard_normal(vocabulary) * spread + draw(st.sampled_from([0.0, -3.0, 13.7, 900.0]))
    index = rng.permutation(vocabulary)
    kind = draw(st.sampled_from(["plain", "peak", "ties", "masked", "one_hot", "nan", "inf", "two", "dead", "round"]))
    if kind == "peak":
        z[index[0]] = z.max() + draw(st.floats(0, 60))
    elif kind == "ties":
        z[index[: 1 + vocabulary // 3]] = z.max()
    elif kind == "masked":
        z[index[: vocabulary - 1 - vocabulary // 5]] = -np.inf
    elif kind == "one_hot":
        z[:] = -np.inf
        z[index[0]] = 0.0
    elif kind == "nan":
        z[index[: vocabulary // 2]] = np.nan
    elif kind == "inf":
        z[index[: 1 + vocabulary // 4]] = np.inf
    elif kind == "two":
        z[:] = -np.inf
        z[index[:2]] = rng.uniform(0, 50, 2)[: min(2, vocabulary)]
    elif kind == "dead":
        z[:] = -np.inf
    elif kind == "round":
        z = np.round(z)
    return z


@pytest.mark.parametrize("vocabulary", [1, 2, 7, 600])
@settings(max_examples=12)
@given(data=st.data())
def test_equals_float64_reference(vocabulary, data):
    dtype = DTYPES[data.draw(st.sampled_from(sorted(DTYPES)))]
    logits = jnp.asarray(np.stack([data.draw(rows(vocabulary)) for _ in range(8)]), dtype)
    tokens = np.array([data.draw(st.integers(-1, vocabulary)) for _ in range(8)], np.int32)
    # Half of the time the drawn token is the most likely one.
    if data.draw(st.booleans()):
        tokens = np.asarray(jnp.argmax(jnp.where(jnp.isnan(logits), -jnp.inf, logits), axis=-1), np.int32)
    temperature = data.draw(st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0, 8.0]))
    assert_accurate(logits, jnp.asarray(tokens), jnp.full((8,), temperature))


def test_whole_range_of_log_odds():
    # Two and three tokens: the log-odds run over +-40 and beyond, the complement of q_max down to 1e-20.
    gaps = np.concatenate([np.linspace(-45, 45, 721), np.linspace(-1e-3, 1e-3, 41)]).astype(np.float32)
    two = np.stack([gaps, np.zeros_like(gaps)], axis=-1)
    three = np.concatenate([two, two[:, :1] - 3], axis=-1)
    for logits in (two, three):
        for token in range(logits.shape[-1]):
            assert_accurate(jnp.asarray(logits), jnp.full((len(gaps),), token, jnp.int32))


def hard_rows(vocabulary):
    """Rows on which float32 sums of 150k terms go wrong."""
    rng = np.random.default_rng(0)
    index = np.arange(vocabulary)
    uniform = np.zeros(vocabulary)
    uneven = np.full(vocabulary, 3.7)
    peak = np.log(vocabulary)  # log-odds near 0 with every other token far below
    outlier = np.where(index == 77, 3.7 + peak, uneven)
    ascending = np.linspace(0, 0.01, vocabulary)
    ascending_then_peak = np.where(index == vocabulary - 1, peak + 0.005, ascending)
    descending = np.linspace(30, 0, vocabulary)
    ties = np.where(index % 3 == 0, 1.0, 0.0)
    late_peak = np.where(index == vocabulary - 1, 33.0, rng.standard_normal(vocabulary))
    masked = np.where(rng.random(vocabulary) < 0.999, -np.inf, rng.standard_normal(vocabulary) * 4)
    one_hot = np.where(index == vocabulary // 2, 0.0, -np.inf)
    normal = rng.standard_normal((3, vocabulary)) * np.array([[0.5], [3.0], [12.0]])
    return np.stack(
        [
            uniform,
            uneven,
            outlier,
            ascending,
            ascending_then_peak,
            descending,
            ties,
            late_peak,
            masked,
            one_hot,
            *normal,
        ]
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.3])
def test_large_vocabulary(temperature):
    # 150,001 is not a multiple of the block: the last block overlaps the one before.
    logits = jnp.asarray(hard_rows(150_001), jnp.float32)
    tokens = jnp.asarray([0, 150_000, 77, 5, 150_000, 0, 3, 150_000, 4, 75_000, 1, 2, 3], jnp.int32)
    assert_accurate(logits, tokens, temperature)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.6123])
def test_equal_tokens_far_below_the_maximum(temperature):
    # The same rounding error 150k times over: log-odds near 0, every other token 12 below.
    rng = np.random.default_rng(1)
    vocabulary, temperature = 150_000, float(np.float32(temperature))
    low = rng.uniform(-20, 20, 12).astype(np.float32)
    top = (low + np.log(vocabulary) * temperature + rng.uniform(-0.1, 0.1, 12)).astype(np.float32)
    logits = np.repeat(low[:, None], vocabulary, axis=1)
    logits[:, 5] = top
    got = compute(jnp.asarray(logits), temperature=temperature, names=("logit_q_max",)).logit_q_max
    want = (top.astype(np.float64) - low) / temperature - np.log(vocabulary - 1)
    np.testing.assert_allclose(got, want, rtol=0, atol=5e-7)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_large_vocabulary_in_half_precision(dtype):
    logits = jnp.asarray(hard_rows(150_000), DTYPES[dtype])
    assert_accurate(logits, jnp.argmax(logits, axis=-1).astype(jnp.int32))


def test_by_hand():
    ln = np.log
    logits = jnp.log(jnp.array([[0.5, 0.25, 0.25], [0.4, 0.4, 0.2], [1.0, 0.0, 0.0]], jnp.float32))
    got = draft_features(logits, jnp.array([1, 1, 1], jnp.int32))
    np.testing.assert_allclose(got.logit_q_max, [0.0, ln(0.4 / 0.6), 40.0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got.entropy, [1.5 * ln(2), -0.8 * ln(0.4) - 0.2 * ln(0.2), 0.0], rtol=1e-5)
    np.testing.assert_allclose(got.margin, [ln(2), 0.0, 40.0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got.log_collision, [ln(0.375), ln(0.36), 0.0], rtol=1e-5)
    np.testing.assert_allclose(got.logit_q_sampled, [ln(1 / 3), ln(0.4 / 0.6), -40.0], rtol=1e-5)


def test_saturated_rows_keep_their_digits():
    # float32 `sumexp - 1` is 0 here and would report the clamp; the complement is e^-30 (twice).
    got = draft_features(jnp.array([30.0, 0.0, 0.0], jnp.float32), jnp.int32(0))
    expected = 30 - np.log(2)
    np.testing.assert_allclose([float(got.logit_q_max), float(got.logit_q_sampled)], expected, rtol=1e-6)
    np.testing.assert_allclose(float(got.entropy), 2 * np.exp(-30.0) * 31, rtol=1e-5)
    np.testing.assert_allclose(float(got.log_collision), -4 * np.exp(-30.0), rtol=1e-5)


def test_rows_without_a_law_and_tokens_outside_it():
    dead = draft_features(jnp.full((2, 5), -jnp.inf).at[1].set(jnp.nan), jnp.array([0, 4], jnp.int32))
    np.testing.assert_array_equal(dead.logit_q_max, [-40.0, -40.0])
    np.testing.assert_array_equal(dead.logit_q_sampled, [-40.0, -40.0])
    for field in (dead.entropy, dead.margin, dead.log_collision):
        np.testing.assert_array_equal(field, [0.0, 0.0])
    tokens = jnp.array([-1, 5, 2, 1], jnp.int32)
    row = jnp.array([0.0, 1.0, -jnp.inf, 2.0, 0.5])
    sampled = draft_features(jnp.broadcast_to(row, (4, 5)), tokens, names=("logit_q_sampled",)).logit_q_sampled
    np.testing.assert_array_equal(sampled[:3], [-40.0] * 3)
    assert sampled[3] > -2
    # The most negative float32, another way of writing a mask, counts as -inf.
    lowest = jnp.where(row == -jnp.inf, jnp.finfo(jnp.float32).min, row)
    for a, b in zip(draft_features(row), draft_features(lowest), strict=True):
        np.testing.assert_array_equal(a, b)


def test_infinite_logits_are_a_point_mass():
    got = draft_features(jnp.array([jnp.inf, 3.0, jnp.inf, -jnp.inf]), jnp.int32(2), temperature=1e9)
    np.testing.assert_allclose([got.logit_q_max, got.margin, got.logit_q_sampled], 0.0, atol=1e-6)
    np.testing.assert_allclose([got.entropy, -got.log_collision], np.log(2), rtol=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_temperature_zero_reads_unscaled_logits(temperature):
    logits = jax.random.normal(jax.random.key(0), (4, 50)) * 3
    mixed = draft_features(logits, temperature=jnp.array([temperature, 0.5, temperature, 2.0]))
    plain, half = draft_features(logits), draft_features(logits, temperature=0.5)
    np.testing.assert_array_equal(mixed.entropy[jnp.array([0, 2])], plain.entropy[jnp.array([0, 2])])
    np.testing.assert_allclose(mixed.entropy[1], half.entropy[1], rtol=1e-6)
    np.testing.assert_allclose(mixed.margin[1], 2 * plain.margin[1], rtol=1e-6)


def test_extreme_temperatures():
    logits = jnp.array([[2.0, 1.0, 1.0, -jnp.inf]] * 4)
    got = draft_features(logits, temperature=jnp.array([1e-37, 1e-12, jnp.inf, jnp.nan]))
    np.testing.assert_allclose(got.entropy, [0, 0, np.log(3), reference.row_features(logits[0])["entropy"]], rtol=1e-6)
    np.testing.assert_allclose(got.margin, [40, 40, 0, 1], atol=1e-6)


def test_temperature_per_request_covers_later_axes():
    logits = jax.random.normal(jax.random.key(0), (3, 5, 40))
    temperature = jnp.array([0.5, 1.0, 2.0])
    got = draft_features(logits, temperature=temperature)
    want = draft_features(logits, temperature=jnp.broadcast_to(temperature[:, None], (3, 5)))
    assert got.margin.shape == (3, 5)
    np.testing.assert_array_equal(got.margin, want.margin)


@pytest.mark.parametrize("with_sampled", [False, True])
def test_no_copy_of_the_logits_is_made(with_sampled):
    logits = jax.ShapeDtypeStruct((64, 150_000), jnp.bfloat16)
    tokens = jax.ShapeDtypeStruct((64,), jnp.int32) if with_sampled else None
    memory = jax.jit(draft_features).lower(logits, tokens).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 0.25 * 64 * 150_000 * 2


def test_a_subset_computes_no_more():
    logits = jax.ShapeDtypeStruct((4, 3000), jnp.float32)

    def operations(*names):
        return str(jax.make_jaxpr(lambda z: draft_features(z, names=names))(logits))

    assert "exp" not in operations("margin")
    assert operations("logit_q_max").count("select_n") < operations("entropy", "log_collision", "margin").count(
        "select_n"
    )
    got = draft_features(jnp.zeros((4, 3)), names=("margin",))
    assert [name for name in DraftFeatures._fields if getattr(got, name) is not None] == ["margin"]
    assert draft_features(jnp.zeros((4, 3)), names=()) == DraftFeatures()


def test_jit_vmap_scan_and_device():
    logits = jax.random.normal(jax.random.key(1), (3, 4, 600)) * 4
    tokens = jax.random.randint(jax.random.key(2), (3, 4), 0, 600)
    want = compute(logits, tokens)
    mapped = jax.jit(jax.vmap(lambda z, x, t: draft_features(z, x, temperature=t)))(logits, tokens, jnp.ones((3,)))
    scanned = jax.jit(lambda *xs: jax.lax.scan(lambda c, row: (c, draft_features(*row)), 0, xs)[1])(logits, tokens)
    for got in (mapped, scanned):
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6)
    assert_stays_on_device(draft_features, logits, tokens)


def test_registry():
    assert tuple(FEATURES) == DraftFeatures._fields
    assert {name for name, spec in FEATURES.items() if spec.depends_on == "draw"} == {"logit_q_sampled"}
    assert all(spec.name == name and spec.doc for name, spec in FEATURES.items())
    assert feature_class(("entropy", "margin")) == "prefix"
    assert feature_class(["entropy", "logit_q_sampled"]) == "draw"
    logits = jax.random.normal(jax.random.key(0), (2, 3, 11))
    tokens = jnp.zeros((2, 3), jnp.int32)
    # Prefix features do not move with the token, the draw feature does.
    one, two = draft_features(logits, tokens), draft_features(logits, tokens + 1)
    for name, spec in FEATURES.items():
        same = bool(jnp.all(getattr(one, name) == getattr(two, name)))
        assert same == (spec.depends_on == "prefix")
    # Without tokens the default leaves the draw features out.
    assert draft_features(logits).logit_q_sampled is None


def test_stack_features():
    features = draft_features(jax.random.normal(jax.random.key(0), (2, 3, 11)))
    np.testing.assert_array_equal(stack_features(features, ("margin",)), features.margin)
    both = stack_features(features, ("entropy", "margin"))
    assert both.shape == (2, 3, 2)
    np.testing.assert_array_equal(both[..., 0], features.entropy)
    np.testing.assert_array_equal(both[..., 1], features.margin)


@pytest.mark.usefixtures("own_checks")
def test_errors():
    logits = jnp.zeros((2, 3, 5))
    with pytest.raises(TypeError, match="logits: expected a float dtype, got int32"):
        draft_features(jnp.zeros((2, 5), jnp.int32))
    with pytest.raises(ValueError, match=r"logits: expected shape \[\.\.\., V\], got \[\]"):
        draft_features(jnp.float32(0))
    with pytest.raises(ValueError, match="V >= 1"):
        draft_features(jnp.zeros((2, 0)))
    with pytest.raises(ValueError, match=r"tokens: expected shape \[2, 3\], got \[2\]"):
        draft_features(logits, jnp.zeros((2,), jnp.int32))
    with pytest.raises(TypeError, match="tokens: expected an integer dtype"):
        draft_features(logits, jnp.zeros((2, 3)))
    with pytest.raises(ValueError, match=r"temperature: expected a scalar or a shape that begins \[2, 3\], got \[3\]"):
        draft_features(logits, temperature=jnp.ones((3,)))
    with pytest.raises(ValueError, match=r"names: expected one of 'logit_q_max', .* got 'entropi'"):
        draft_features(logits, names=("entropi",))
    with pytest.raises(TypeError, match="names: expected a tuple of feature names, got 'entropy'"):
        draft_features(logits, names="entropy")
    with pytest.raises(ValueError, match="names: expected distinct features"):
        draft_features(logits, names=("entropy", "entropy"))
    with pytest.raises(ValueError, match=r"tokens: expected int \[\.\.\.\] because names asks for 'logit_q_sampled'"):
        draft_features(logits, names=("logit_q_sampled",))
    with pytest.raises(ValueError, match="features: expected entropy, margin, got none for margin"):
        stack_features(draft_features(logits, names=("entropy",)), ("entropy", "margin"))
    with pytest.raises(ValueError, match="at least one feature"):
        stack_features(draft_features(logits), ())
    with pytest.raises(ValueError, match="names: expected one of"):
        feature_class(("q_max",))
