"""Every estimator of the package speaks the same protocol."""

import functools
import inspect
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from specav import estimators
from specav.features import FEATURES
from specav.labels import Labels
from tests.helpers import assert_stays_on_device, count_traces

ESTIMATORS = {
    "vllm_online": lambda: estimators.vllm_online(3),
    "online_logistic": lambda: estimators.online_logistic(3),
    "online_logistic, two": lambda: estimators.online_logistic(3, ("logit_q_sampled", "entropy"), refit_interval=2),
}
ARGUMENTS = {
    "init": [],
    "predict": ["state", "features", "depth"],
    "observe": ["state", "features", "probs", "labels", "depth"],
    "refit": ["state"],
    "step": ["state", "features", "probs", "labels", "depth"],
}
every = pytest.mark.parametrize("make", ESTIMATORS.values(), ids=ESTIMATORS.keys())


@functools.cache
def compiled(make):
    """The estimator's functions under jit, compiled once for the whole module, and its initial state."""
    estimator = make()
    step, step_traces = count_traces(estimator.step)
    predict, predict_traces = count_traces(estimator.predict)
    return SimpleNamespace(
        start=estimator.init(),
        predict=predict,
        predict_at=jax.jit(lambda state, features, depth: estimator.predict(state, features, depth=depth)),
        observe=jax.jit(estimator.observe),
        observe_at=jax.jit(lambda state, f, p, y, depth: estimator.observe(state, f, p, y, depth=depth)),
        refit=jax.jit(estimator.refit),
        step=step,
        step_traces=step_traces,
        predict_traces=predict_traces,
    )


def a_round(estimator, seed=0, batch=4, columns=3):
    rng = np.random.default_rng(seed)
    d = len(estimator.features)
    features = rng.normal(1.0, 2.0, (batch, columns) if d == 1 else (batch, columns, d)).astype(np.float32)
    probs = rng.uniform(0.1, 0.9, (batch, columns)).astype(np.float32)
    accepted, observed = rng.random((batch, columns)) < 0.7, rng.random((batch, columns)) < 0.8
    return features, probs, Labels(accepted, observed)


def same_type(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)


def test_no_estimator_is_left_out():
    public = {name for name in estimators.__all__ if inspect.isfunction(getattr(estimators, name))}
    assert public == {name.split(",")[0] for name in ESTIMATORS}


@every
def test_same_names_and_a_round_trip(make):
    estimator = make()
    assert isinstance(estimator, estimators.AcceptanceEstimator)
    for name, arguments in ARGUMENTS.items():
        assert list(inspect.signature(getattr(estimator, name)).parameters) == arguments, name
    assert estimator.depends_on in ("prefix", "draw")
    assert set(estimator.features) <= set(FEATURES)

    run = compiled(make)
    state = run.start
    features, _, labels = a_round(estimator)
    probs = run.predict(state, features)
    assert (probs.shape, probs.dtype) == ((4, 3), jnp.float32)
    seen = run.observe(state, features, probs, labels)
    fitted, info = run.refit(seen)
    stepped, step_info = run.step(state, features, probs, labels)
    for other in (seen, fitted, stepped):
        same_type(state, other)
    same_type(info, step_info)
    assert isinstance(info, estimators.RefitInfo)
    assert bool(info.refitted) and float(info.num_observed) == int(np.sum(labels.observed))
    gap = np.mean((np.asarray(probs) - labels.accepted)[labels.observed])
    np.testing.assert_allclose(info.calibration_gap, gap, atol=1e-6)
    assert float(info.step_norm) > 0
    assert not np.array_equal(fitted.intercepts, state.intercepts)
    # Nothing is left for a second refit.
    again, info = run.refit(fitted)
    np.testing.assert_allclose(again.intercepts, fitted.intercepts, atol=1e-6)
    assert float(info.num_observed) == 0 and float(info.calibration_gap) == 0


@every
def test_step_is_observe_and_now_and_then_refit(make):
    estimator, run = make(), compiled(make)
    state = by_hand = run.start
    refits = 0
    for t in range(101):
        features, probs, labels = a_round(estimator, t)
        state, info = run.step(state, features, probs, labels)
        by_hand = run.observe(by_hand, features, probs, labels)
        if info.refitted:
            by_hand, _ = run.refit(by_hand)
            refits += 1
        for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(by_hand), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert 0 < refits < 101


@every
def test_depth_says_which_intercept_a_column_belongs_to(make):
    estimator, run = make(), compiled(make)
    state = run.start._replace(intercepts=np.float32([0.0, 1.0, -1.0]))
    features, probs, labels = a_round(estimator)
    columns = np.broadcast_to(np.arange(3, dtype=np.int32), (4, 3))
    predicted = np.asarray(run.predict(state, features))
    np.testing.assert_array_equal(predicted, run.predict_at(state, features, columns))
    # Columns 1.. as kept drafts in columns 0..: the same predictions, the same lesson. (The last column is empty.)
    moved = [np.roll(x, -1, axis=1) for x in (features, probs, *labels)]
    depth = np.minimum(columns + 1, 2)
    np.testing.assert_array_equal(predicted[:, 1:], np.asarray(run.predict_at(state, moved[0], depth))[:, :2])
    hidden = labels._replace(observed=labels.observed & (columns > 0))
    whole = run.observe(state, features, probs, hidden)
    kept = Labels(moved[2], moved[3] & (columns < 2))
    part = run.observe_at(state, moved[0], moved[1], kept, depth)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(part), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
    # Depths out of range are clamped.
    last = np.full_like(columns, 2)
    np.testing.assert_array_equal(run.predict_at(state, features, last + 5), run.predict_at(state, features, last))


@every
def test_rows_with_nan_teach_nothing_and_fall_back_to_the_intercept(make):
    estimator, run = make(), compiled(make)
    state = run.start
    features, probs, labels = a_round(estimator)
    soft, sure = labels.accepted.astype(np.float32), labels.observed.copy()
    sure[1, 2] = True

    def spoil(values):
        values = values.copy()
        values[(1, 2) + (0,) * (values.ndim - 2)] = np.nan
        return values

    without = sure.copy()
    without[1, 2] = False
    expected = run.observe(state, features, probs, Labels(soft, without))
    spoiled = [(spoil(features), probs, soft), (features, spoil(probs), soft), (features, probs, spoil(soft))]
    for f, p, y in spoiled:
        got = run.observe(state, f, p, Labels(y, sure))
        for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
    fallback = run.predict(state, spoiled[0][0])[1, 2]
    np.testing.assert_allclose(fallback, 1 / (1 + np.exp(-np.asarray(state.intercepts)[2])), rtol=1e-6)


@every
def test_predictions_stay_inside_the_clip(make):
    run = compiled(make)
    state = run.start._replace(slopes=np.full(run.start.slopes.shape, 9.0, np.float32))
    for value, wanted in ((np.inf, 1 - 2.0**-24), (-np.inf, 2.0**-24)):
        features = np.full_like(a_round(make())[0], value)
        np.testing.assert_array_equal(run.predict(state, features), np.float32(wanted))


@every
def test_compiles_once_and_stays_on_the_device(make):
    estimator, run = make(), compiled(make)
    state = run.start
    for t in range(20):
        features, _, labels = a_round(estimator, t)
        labels = labels._replace(observed=labels.observed & (np.arange(4) < t % 5)[:, None])
        state, _ = run.step(state, features, run.predict(state, features), labels)
        if t == 0:  # in the first call, unless another test was first
            before = len(run.predict_traces), len(run.step_traces)
    assert (len(run.predict_traces), len(run.step_traces)) == before
    features, probs, labels = a_round(estimator)
    assert_stays_on_device(run.predict, state, features)
    assert_stays_on_device(run.step, state, features, probs, labels)


@every
def test_vmap_and_half_precision(make):
    estimator, run = make(), compiled(make)
    rounds = [a_round(estimator, t) for t in range(3)]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *rounds)
    states, _ = jax.jit(jax.vmap(lambda r: estimator.step(run.start, *r)))(stacked)
    for t, one in enumerate(rounds):
        for a, b in zip(jax.tree.leaves(states), jax.tree.leaves(run.step(run.start, *one)[0]), strict=True):
            np.testing.assert_allclose(a[t], b, rtol=1e-5, atol=1e-5)
    features, probs, labels = rounds[0]
    half = jax.eval_shape(estimator.step, run.start, features.astype(jnp.bfloat16), probs.astype(jnp.bfloat16), labels)
    same_type(half[0], run.start)
    np.testing.assert_allclose(
        estimator.predict(run.start, jnp.asarray(features, jnp.bfloat16)),
        run.predict(run.start, features.astype(jnp.bfloat16).astype(np.float32)),
        rtol=1e-6,
    )


@every
def test_without_an_axis_name_each_replica_learns_for_itself(make):
    estimator, run = make(), compiled(make)
    rounds = [a_round(estimator, seed) for seed in range(4)]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *rounds)
    starts = jax.tree.map(lambda leaf: np.stack([leaf] * 4), run.start)

    def learn(state, one):
        state, one = jax.tree.map(lambda leaf: leaf[0], (state, one))
        return jax.tree.map(lambda leaf: leaf[None], estimator.step(state, *one)[0])

    spec, mesh = PartitionSpec("replicas"), Mesh(np.array(jax.devices()[:4]), ("replicas",))
    states = jax.jit(jax.shard_map(learn, mesh=mesh, in_specs=(spec, spec), out_specs=spec))(starts, stacked)
    alone = run.step(run.start, *rounds[3])[0]
    for a, b in zip(jax.tree.leaves(states), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(a[3], b, rtol=1e-5, atol=1e-5)


@every
@pytest.mark.usefixtures("own_checks")
def test_errors_say_what_was_expected(make):
    estimator = make()
    state = estimator.init()
    features, probs, labels = jax.tree.map(jnp.asarray, a_round(estimator))
    tail = "" if features.ndim == 2 else ", 2"
    with pytest.raises(ValueError, match=rf"features: expected shape \[B, 3{tail}\], got"):
        estimator.predict(state, features[:, :2])
    with pytest.raises(TypeError, match="features: expected a float dtype, got int32"):
        estimator.predict(state, features.astype(jnp.int32))
    with pytest.raises(ValueError, match=r"depth: expected shape \[B=4, C=3\], got \[4\]"):
        estimator.predict(state, features, depth=jnp.arange(4))
    with pytest.raises(ValueError, match=r"probs: expected shape \[B=4, C=3\], got \[2, 3\]"):
        estimator.step(state, features, probs[:2], labels)
    with pytest.raises(TypeError, match=r"labels: expected Labels\(accepted, observed\), got ArrayImpl"):
        estimator.step(state, features, probs, labels.accepted)
    with pytest.raises(TypeError, match=r"labels\.observed: expected bool, got int32"):
        estimator.step(state, features, probs, labels._replace(observed=labels.observed.astype(jnp.int32)))
    with pytest.raises(TypeError, match=r"labels\.accepted: expected bool, got int32"):
        estimator.step(state, features, probs, labels._replace(accepted=labels.accepted.astype(jnp.int32)))


@pytest.mark.usefixtures("own_checks")
@pytest.mark.parametrize("make", [estimators.vllm_online, estimators.online_logistic])
def test_num_positions_is_checked(make):
    with pytest.raises(ValueError, match="num_positions: expected an int of at least 1, got 0"):
        make(0)
    with pytest.raises(TypeError, match="num_positions: expected a Python int, got float"):
        make(2.0)
