"""Metrics: against float64 NumPy and scikit-learn, by hand, on long arrays, and streamed."""

import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.metrics
from hypothesis import given, settings
from sklearn.calibration import calibration_curve

from specav import metrics
from tests.helpers import assert_stays_on_device, count_traces

STREAMS = {
    "auc": metrics.streaming_auc(),
    "log_loss": metrics.streaming_log_loss(),
    "brier": metrics.streaming_brier(),
    "ece": metrics.streaming_expected_calibration_error(),
    "curve": metrics.streaming_reliability_curve(10),
}
EXACT = {
    "log_loss": metrics.log_loss,
    "brier": metrics.brier,
    "ece": metrics.expected_calibration_error,
    "curve": lambda *args, **options: metrics.reliability_curve(*args, bins=10, **options),
}


def reference_auc(scores, labels, weights):
    """Every pair of rows, O(n^2)."""
    wins = np.where(scores[:, None] > scores, 1.0, np.where(scores[:, None] == scores, 0.5, 0.0))
    accepted, rejected = weights * labels, weights * (1 - labels)
    pairs = accepted.sum() * rejected.sum()
    return accepted @ wins @ rejected / pairs if pairs > 0 else np.nan


def reference_losses(probs, labels, weights):
    clipped = np.clip(probs, 2.0**-24, 1 - 2.0**-24)
    log_loss = -(labels * np.log(clipped) + (1 - labels) * np.log(1 - clipped))
    square = labels * (1 - probs) ** 2 + (1 - labels) * probs**2
    total = weights.sum()
    return ((weights * log_loss).sum() / total, (weights * square).sum() / total) if total > 0 else (np.nan, np.nan)


def reference_bins(probs, bins, kind, weights):
    """Bin of each row: (k / bins, (k + 1) / bins], or between weighted quantiles."""
    if kind == "equal_width":
        return np.clip(np.ceil(probs * bins) - 1, 0, bins - 1).astype(int)
    total = weights.sum()
    spread = total - (weights**2).sum() / total
    before = np.array([weights[probs < p].sum() for p in probs])
    return (before[:, None] > np.arange(1, bins) * spread / bins + 1e-9 * total).sum(axis=1)


def reference_calibration(probs, labels, weights, bins, kind):
    """(ECE, its debiased form, l2, l2 debiased) bin by bin."""
    which = reference_bins(probs, bins, kind, weights)
    plain = debiased = square = square_debiased = 0.0
    total = weights.sum()
    for b in range(bins):
        w, r = weights[which == b], (probs - labels)[which == b]
        if w.sum() == 0:
            continue
        share, gap = w.sum() / total, (w * r).sum() / w.sum()
        plain += share * abs(gap)
        debiased += share * (abs(gap) - np.sqrt(2 / np.pi * ((w * r) ** 2).sum()) / w.sum())
        square += share * gap**2
        others = w.sum() ** 2 - (w**2).sum()
        if others > 1e-6 * w.sum() ** 2:
            products = np.outer(w * r, w * r)
            square_debiased += share * (products.sum() - np.trace(products)) / others
    return plain, debiased, np.sqrt(square), np.sqrt(max(square_debiased, 0.0))


@st.composite
def labelled_rows(draw, size=64):
    """float64 copies of float32 rows: ties, extreme probabilities, hard or soft labels, weights with zeros."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    probs = rng.random(size)
    if draw(st.booleans()):
        probs = np.round(probs * 16) / 16  # exact ties, exact bin edges for 16 bins
    probs[rng.random(size) < 0.1] = draw(st.sampled_from([0.0, 1.0, 1e-9, 1 - 2.0**-24]))
    soft = rng.random(size)
    labels = soft if draw(st.booleans()) else (rng.random(size) < draw(st.sampled_from([0.0, 0.5, 0.9]))).astype(float)
    kind = draw(st.sampled_from(["ones", "mask", "real"]))
    weights = {"ones": np.ones(size), "mask": rng.random(size) < 0.6, "real": rng.random(size) * 5}[kind]
    return tuple(np.asarray(x, np.float32).astype(np.float64) for x in (probs, labels, weights))


def padded(values, fill=0.0, size=64):
    """float32 [64] with `fill` behind: most tests share one shape, hence their compilations."""
    values = np.asarray(values, np.float32)
    return np.concatenate([values, np.full(size - len(values), fill, np.float32)])


def rows_of(probs, labels, weights=None):
    """Padded rows; those behind have weight 0, and NaN in them does not matter."""
    weights = np.ones(len(probs)) if weights is None else weights
    return padded(probs, np.nan), padded(labels, np.nan), padded(weights)


def as_float32(*arrays):
    return tuple(jnp.asarray(x, jnp.float32) for x in arrays)


@given(labelled_rows())
def test_equals_float64_reference(rows):
    probs, labels, weights = rows
    p, y, w = as_float32(*rows)
    np.testing.assert_allclose(metrics.auc(p, y, weights=w), reference_auc(*rows), atol=1e-6, rtol=0)
    loss, square = reference_losses(*rows)
    np.testing.assert_allclose(metrics.log_loss(p, y, weights=w), loss, rtol=1e-6)
    np.testing.assert_allclose(metrics.brier(p, y, weights=w), square, rtol=1e-6, atol=1e-7)
    for kind in ("equal_width", "equal_mass"):
        want = reference_calibration(probs, labels, weights, 16, kind)
        got = [
            metrics.expected_calibration_error(p, y, bins=16, kind=kind, norm=norm, debiased=debiased, weights=w)
            for norm in ("l1", "l2")
            for debiased in (False, True)
        ]
        np.testing.assert_allclose(got[:3], want[:3], atol=1e-6)
        np.testing.assert_allclose(np.square(got[3]), np.square(want[3]), atol=1e-6)


@given(labelled_rows(), st.integers(0, 2**32 - 1))
def test_rows_without_weight_do_not_matter(rows, seed):
    rng = np.random.default_rng(seed)
    p, y, w = (np.asarray(x, np.float32) for x in rows)
    w[0] = 1.0
    kept = w > 0
    noisy = [np.where(kept, x, rng.choice([np.nan, np.inf, -1.0, 0.5], x.shape)).astype(np.float32) for x in (p, y)]
    order = rng.permutation(len(p))
    mass = functools.partial(metrics.expected_calibration_error, kind="equal_mass", bins=16)
    for function in (metrics.auc, metrics.log_loss, metrics.brier, metrics.expected_calibration_error, mass):
        want = function(p[kept], y[kept], weights=w[kept])
        np.testing.assert_allclose(function(*noisy, weights=w), want, atol=1e-6)
        # Neither the order of the rows nor the unit of the weights matters.
        got = function(p[order], y[order], weights=4 * w[order])
        np.testing.assert_allclose(got, function(p, y, weights=w), atol=1e-6)


def drawn(n, seed=0):
    """Predictions with ties, verdicts by a distorted law, weights."""
    rng = np.random.default_rng(seed)
    z = rng.normal(1.0, 2.0, n)
    probs = 1 / (1 + np.exp(-z))
    probs = np.where(rng.random(n) < 0.3, np.round(probs, 2), probs).clip(1e-4, 1 - 1e-4).astype(np.float32)
    return probs, rng.random(n) < 1 / (1 + np.exp(-0.8 * z)), (rng.random(n) * 3).astype(np.float32)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("n", [60, 1_000_000])
def test_agrees_with_scikit_learn(n, weighted):
    probs, labels, weights = drawn(n)
    weights = weights if weighted else None
    p64 = probs.astype(np.float64)
    options = {"sample_weight": weights.astype(np.float64)} if weighted else {}
    want = sklearn.metrics.roc_auc_score(labels, p64, **options)
    np.testing.assert_allclose(metrics.auc(probs, labels, weights=weights), want, atol=1e-6)
    want = sklearn.metrics.log_loss(labels, p64, **options)
    np.testing.assert_allclose(metrics.log_loss(probs, labels, weights=weights), want, atol=1e-6)
    want = sklearn.metrics.brier_score_loss(labels, p64, **options)
    np.testing.assert_allclose(metrics.brier(probs, labels, weights=weights), want, atol=1e-6)


# scikit-learn's quantiles are computed in floats, and off by one row where a quantile falls on a row: 4,999 rows
# and 7 or 11 bins keep clear of that. The predictions are multiples of 1/20 for "equal_width": on the edges.
@pytest.mark.parametrize(("kind", "strategy", "bins"), [("equal_width", "uniform", 20), ("equal_mass", "quantile", 11)])
@pytest.mark.parametrize("tied", [False, True])
def test_curve_agrees_with_scikit_learn(kind, strategy, bins, tied):
    probs, labels, _ = drawn(4999)
    probs = np.round(probs * 20).astype(np.float32) / np.float32(20) if tied else probs
    want_label, want_prediction = calibration_curve(labels, probs.astype(np.float64), n_bins=bins, strategy=strategy)
    curve = metrics.reliability_curve(probs, labels, bins=bins, kind=kind)
    seen = np.asarray(curve.weight) > 0
    np.testing.assert_allclose(np.asarray(curve.mean_label)[seen], want_label, atol=1e-6)
    np.testing.assert_allclose(np.asarray(curve.mean_prediction)[seen], want_prediction, atol=1e-6)
    assert np.all(np.isnan(np.asarray(curve.mean_label)[~seen])) and float(curve.weight.sum()) == 4999


def test_long_arrays_do_not_drift():
    # Equal rows are the worst case of a float32 sum: every addition rounds the same way.
    n = 1_000_000
    probs, labels = np.full(n, 0.1, np.float32), np.arange(n) % 10 == 0
    p = float(np.float32(0.1))
    assert abs(np.cumsum(probs)[-1] / n - p) > 1e-5
    want = -(0.1 * np.log(p) + 0.9 * np.log(1 - p))
    np.testing.assert_allclose(metrics.log_loss(probs, labels), want, rtol=2e-7)
    np.testing.assert_allclose(metrics.expected_calibration_error(probs, labels), p - 0.1, atol=1e-8)
    curve = metrics.reliability_curve(probs, labels)
    np.testing.assert_allclose([curve.mean_prediction[1], curve.mean_label[1]], [p, 0.1], rtol=1e-7)


def test_by_hand():
    p, y, w = rows_of([0.9, 0.6, 0.6, 0.2], [1, 1, 0, 0])
    # Pairs (accepted, rejected): .9 beats .6 and .2; .6 ties .6 and beats .2.
    np.testing.assert_allclose(metrics.auc(p, y, weights=w), 3.5 / 4)
    np.testing.assert_allclose(metrics.log_loss(p, y, weights=w), -np.log([0.9, 0.6, 0.4, 0.8]).mean(), rtol=1e-6)
    np.testing.assert_allclose(metrics.brier(p, y, weights=w), (0.01 + 0.16 + 0.36 + 0.04) / 4, rtol=1e-6)
    # Two bins: {.2: 0 accepted} and {.9, .6, .6: 2 of 3}.
    want = (0.2 + abs(2.1 - 2)) / 4
    np.testing.assert_allclose(metrics.expected_calibration_error(p, y, weights=w, bins=2), want, rtol=1e-6)
    curve = metrics.reliability_curve(p, y, weights=w, bins=2)
    np.testing.assert_allclose(curve.mean_prediction, [0.2, 0.7], rtol=1e-6)
    np.testing.assert_allclose(curve.mean_label, [0, 2 / 3], rtol=1e-6)
    np.testing.assert_allclose(curve.weight, [1, 3])


def test_probabilities_are_clipped_in_log_loss_alone():
    assert metrics.PROBABILITY_CLIP == 2.0**-24
    p, y, w = rows_of([0.0, 1.0, 1e-30], [1, 0, 1])
    np.testing.assert_allclose(metrics.log_loss(p, y, weights=w), 24 * np.log(2), rtol=1e-6)
    np.testing.assert_allclose(metrics.log_loss(p, 1 - y, weights=w), 2.0**-24, rtol=1e-3)
    p, y, w = rows_of([1, 1], [1, 1])
    assert float(metrics.brier(p, y, weights=w)) == 0.0
    # AUC compares log-odds features too, and infinities.
    p, y, w = rows_of([np.inf, -40.0, 3.0, -np.inf], [1, 0, 1, 0])
    assert float(metrics.auc(p, y, weights=w)) == 1.0


@pytest.mark.parametrize("labels", [np.zeros(64), np.ones(64), np.zeros(0)], ids=["rejected", "accepted", "none"])
def test_one_class_and_no_rows(labels):
    probs = np.full(labels.shape, 0.5, np.float32)
    assert np.isnan(metrics.auc(probs, labels))
    stream = STREAMS["auc"]
    assert np.all(np.isnan(stream.compute(stream.update(stream.init(), probs, labels))))
    for name, function in EXACT.items():
        empty = np.isnan(jax.tree.leaves(function(probs, labels))[0])
        assert np.all(empty) if labels.size == 0 else not np.all(empty), name
        none_left = np.isnan(jax.tree.leaves(function(probs, labels, weights=np.zeros(labels.shape)))[0])
        assert np.all(none_left), name


def test_nan_in_a_row_that_counts_shows():
    ones = np.ones(64, np.float32)
    for p, y in (([0.5, np.nan, 0.2], [1, 0, 0]), ([0.5, 0.1, 0.2], [1, 0, np.nan])):
        p, y = padded(p, 0.5), padded(y)
        for function in (metrics.auc, *EXACT.values()):
            assert np.all(np.isnan(jax.tree.leaves(function(p, y, weights=ones))[0]))
            assert not np.all(np.isnan(jax.tree.leaves(function(p, y, weights=ones * ~np.isnan(p + y)))[0]))
        for stream in STREAMS.values():
            state = stream.update(stream.update(stream.init(), p, y, ones), padded([0.5]), padded([1]), ones)
            assert np.all(np.isnan(jax.tree.leaves(stream.compute(state))[0]))


@pytest.mark.parametrize(("n", "noise", "repeats"), [(5_000, 0.016, 80), (100_000, 0.0034, 3)])
def test_debiasing_takes_the_sampling_noise_off(n, noise, repeats):
    # A perfect predictor: its ECE is noise alone. Shapes as elsewhere in this module: 8,192 and 1,000,000 rows.
    size = 8_192 if n == 5_000 else 1_000_000
    rng = np.random.default_rng(1)
    weights = (np.arange(size) < n).astype(np.float32)
    errors = []
    for _ in range(repeats):
        p = np.zeros(size, np.float32)
        p[:n] = rng.beta(2.0, 1.0, n)
        y = (rng.random(size) < p).astype(np.float32)
        errors.append([metrics.expected_calibration_error(p, y, weights=weights, debiased=d) for d in (False, True)])
    plain, debiased = np.mean(errors, axis=0)
    assert 0.7 * noise < plain < 1.3 * noise
    assert abs(debiased) < (0.05 if n == 5_000 else 0.25) * plain


def test_debiased_l2_error_is_unbiased():
    # Predictions .2 too low: the squared error is .04, and five bins of 40 rows add about 5 * .2 / 200 of noise.
    truth = jax.random.uniform(jax.random.key(1), (2000, 200), minval=0.2, maxval=0.95)
    labels = jax.random.bernoulli(jax.random.key(2), truth)

    def errors(p, y):
        return [metrics.expected_calibration_error(p, y, bins=5, norm="l2", debiased=d) for d in (False, True)]

    plain, debiased = (float(jnp.mean(e**2)) for e in jax.jit(jax.vmap(errors))(truth - 0.2, labels))
    assert abs(debiased - 0.04) < 1e-3 < 3e-3 < plain - 0.04


def test_soft_labels_mean_the_same_as_hard_ones():
    key = jax.random.key(0)
    probs, soft = np.asarray(jax.random.uniform(key, (2, 32)))
    # Each soft row written as an accepted and a rejected one.
    doubled, verdicts = np.concatenate([probs, probs]), np.repeat(np.float32([1, 0]), 32)
    weights = np.concatenate([soft, 1 - soft])
    for function in (metrics.auc, *EXACT.values()):
        got = function(*rows_of(probs, soft)[:2], weights=rows_of(probs, soft)[2])
        want = function(doubled, verdicts, weights=weights)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5)


def leaves_close(a, b, **tolerance):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, **tolerance)


@pytest.mark.parametrize("name", sorted(STREAMS))
@settings(max_examples=20)
@given(labelled_rows())
def test_streams_merge_to_one_pass(name, rows):
    stream = STREAMS[name]
    p, y, w = as_float32(*rows)
    update = stream.update
    whole = update(stream.init(), p, y, w)
    # Three shards, dealt out at random; rows of the other shards have weight 0.
    shard = np.random.default_rng(len(name)).integers(0, 3, p.shape)
    parts = [jnp.where(shard == i, w, 0.0) for i in range(3)]
    a, b, c = (update(stream.init(), p, y, part) for part in parts)
    in_turn = functools.reduce(lambda state, part: update(state, p, y, part), parts, stream.init())
    for state in (
        in_turn,
        stream.merge(stream.merge(a, b), c),
        stream.merge(a, stream.merge(b, c)),
        stream.merge(c, stream.merge(stream.init(), stream.merge(b, a))),
    ):
        leaves_close(stream.compute(state), stream.compute(whole), rtol=3e-7, atol=1e-7)
    if name in EXACT:
        leaves_close(stream.compute(whole), EXACT[name](p, y, weights=w), rtol=3e-7, atol=1e-7)


@pytest.mark.parametrize(("bins", "inputs"), [(16, "probabilities"), (2048, "probabilities"), (2048, "logits")])
def test_streaming_auc_keeps_its_bound(bins, inputs):
    probs, labels, weights = drawn(8000)
    scores = probs if inputs == "probabilities" else (30 * (probs - 0.5)).astype(np.float32)
    stream = metrics.streaming_auc(bins, inputs=inputs)
    got = stream.compute(stream.update(stream.init(), scores, labels, weights))
    exact = float(metrics.auc(scores, labels, weights=weights))
    assert abs(float(got.auc) - exact) <= float(got.error) + 1e-6
    assert float(got.error) == pytest.approx({16: 0.1, 2048: 0.001}[bins], rel=0.5)


def test_streaming_auc_orders_the_ends_of_the_range():
    # The largest probabilities below 1 and the smallest ones: cells by comparison with their edges keep the order.
    probs = np.concatenate([1 - np.arange(32) * 2.0**-24, np.geomspace(1e-30, 1e-3, 32)]).astype(np.float32)
    labels = (np.arange(64) % 3 == 0).astype(np.float32)
    stream = STREAMS["auc"]
    got = stream.compute(stream.update(stream.init(), probs, labels))
    assert abs(float(got.auc) - float(metrics.auc(probs, labels))) <= float(got.error) + 1e-6


@pytest.mark.parametrize("name", ["auc", "log_loss", "curve"])  # the others have the states of these
def test_ten_million_rows(name):
    # 1,221 batches of 8,192 rows, half of them equal: plain float32 sums lose digits here.
    stream = STREAMS[name]
    probs, labels, weights = drawn(8192)
    probs[:4096], weights[:4096] = 0.1, 0.3
    batch = stream.update(stream.init(), probs, labels, weights)
    run = jax.jit(lambda state: jax.lax.fori_loop(0, 1220, lambda _, s: stream.merge(s, batch), state))
    state = stream.update(run(stream.init()), probs, labels, weights)
    got, want = stream.compute(state), stream.compute(batch)
    if name == "curve":
        want = want._replace(weight=1221 * np.asarray(want.weight, np.float64))
    leaves_close(got, want, rtol=2e-7)


def test_jit_vmap_scan_and_device():
    rng = np.random.default_rng(0)
    p = rng.random((4, 8, 8), np.float32)
    y, w = rng.random(p.shape) < p, rng.random(p.shape) < 0.8
    functions = (metrics.auc, metrics.log_loss, EXACT["curve"])

    def together(p, y, w):
        return tuple(function(p, y, weights=w) for function in functions)

    want = [together(p[i], y[i], w[i]) for i in range(4)]
    mapped, traces = count_traces(jax.vmap(together))
    for order in (range(4), range(3, -1, -1)):
        order = list(order)
        stacked = jax.tree.map(lambda *x: np.stack(x), *(want[i] for i in order))
        leaves_close(mapped(p[order], y[order], w[order]), stacked, rtol=1e-6)
    assert len(traces) == 1
    assert_stays_on_device(together, p[0], y[0], w[0])

    streams = (STREAMS["auc"], STREAMS["ece"])

    def run(p, y, w):
        def one(states, rows):
            return tuple(s.update(state, *rows) for s, state in zip(streams, states, strict=True)), None

        return jax.lax.scan(one, tuple(s.init() for s in streams), (p, y, w))[0]

    states = jax.jit(run)(p, y, w)
    for stream, state in zip(streams, states, strict=True):
        once = functools.reduce(lambda s, i, stream=stream: stream.update(s, p[i], y[i], w[i]), range(4), stream.init())
        leaves_close(stream.compute(state), stream.compute(once), rtol=1e-6)
    assert_stays_on_device(run, p, y, w)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_predictions(dtype):
    probs, labels, _ = drawn(64)
    rounded = jnp.asarray(probs, dtype)
    for function in (metrics.auc, metrics.log_loss, metrics.brier, metrics.expected_calibration_error):
        got = function(rounded, labels)
        assert got.dtype == jnp.float32
        assert float(got) == float(function(rounded.astype(jnp.float32), labels))


@pytest.mark.usefixtures("own_checks")
def test_errors():
    p, y = jnp.full((2, 3), 0.5), jnp.zeros((2, 3), jnp.bool_)
    with pytest.raises(TypeError, match="probs: expected a float dtype, got bool"):
        metrics.log_loss(y, y)
    with pytest.raises(ValueError, match=r"labels: expected shape \[2, 3\] as scores, got \[3\]"):
        metrics.auc(p, y[0])
    with pytest.raises(ValueError, match=r"weights: expected shape \[2, 3\] as probs, got \[\]"):
        metrics.brier(p, y, weights=1.0)
    with pytest.raises(TypeError, match="labels: expected a real dtype, got complex64"):
        metrics.brier(p, jnp.zeros((2, 3), jnp.complex64))
    with pytest.raises(ValueError, match="kind: expected one of 'equal_width', 'equal_mass', got 'quantile'"):
        metrics.expected_calibration_error(p, y, kind="quantile")
    with pytest.raises(ValueError, match="norm: expected one of 'l1', 'l2', got 'max'"):
        metrics.expected_calibration_error(p, y, norm="max")
    with pytest.raises(ValueError, match="bins: expected an int of at least 1, got 0"):
        metrics.reliability_curve(p, y, bins=0)
    with pytest.raises(TypeError, match="bins: expected a Python int"):
        metrics.streaming_auc(2.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="inputs: expected one of"):
        metrics.streaming_auc(inputs="probs")
    with pytest.raises(ValueError, match="max_logit: expected a number in"):
        metrics.streaming_auc(max_logit=-1.0)
    with pytest.raises(ValueError, match="norm: expected one of"):
        metrics.streaming_expected_calibration_error(norm="l3")
    with pytest.raises(ValueError, match=r"labels: expected shape \[2, 3\] as probs, got \[2\]"):
        metrics.streaming_log_loss().update(metrics.streaming_log_loss().init(), p, y[:, 0])
