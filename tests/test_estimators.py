"""Every estimator of the package speaks the same protocol."""

import inspect

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


def a_round(estimator, seed=0, batch=4, columns=3):
    rng = np.random.default_rng(seed)
    d = len(estimator.features)
    features = rng.normal(1.0, 2.0, (batch, columns) if d == 1 else (batch, columns, d)).astype(np.float32)
    probs = rng.uniform(0.1, 0.9, (batch, columns)).astype(np.float32)
    accepted, observed = rng.random((batch, columns)) < 0.7, rng.random((batch, columns)) < 0.8
    return jnp.asarray(features), jnp.asarray(probs), Labels(jnp.asarray(accepted), jnp.asarray(observed))


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

    state = estimator.init()
    features, _, labels = a_round(estimator)
    probs = estimator.predict(state, features)
    assert (probs.shape, probs.dtype) == ((4, 3), jnp.float32)
    seen = estimator.observe(state, features, probs, labels)
    fitted, info = estimator.refit(seen)
    stepped, step_info = estimator.step(state, features, probs, labels)
    for other in (seen, fitted, stepped):
        same_type(state, other)
    same_type(info, step_info)
    assert isinstance(info, estimators.RefitInfo)
    assert bool(info.refitted) and float(info.num_observed) == int(jnp.sum(labels.observed))
    gap = np.mean((np.asarray(probs) - np.asarray(labels.accepted))[np.asarray(labels.observed)])
    np.testing.assert_allclose(info.calibration_gap, gap, atol=1e-6)
    assert float(info.step_norm) > 0
    assert not np.array_equal(fitted.intercepts, state.intercepts)
    # Nothing is left for a second refit.
    again, info = estimator.refit(fitted)
    np.testing.assert_allclose(again.intercepts, fitted.intercepts, atol=1e-6)
    assert float(info.num_observed) == 0 and float(info.calibration_gap) == 0


@every
def test_step_is_observe_and_now_and_then_refit(make):
    estimator = make()
    state = by_hand = estimator.init()
    step, observe, refit = (jax.jit(f) for f in (estimator.step, estimator.observe, estimator.refit))
    refits = 0
    for t in range(101):
        features, probs, labels = a_round(estimator, t)
        state, info = step(state, features, probs, labels)
        by_hand = observe(by_hand, features, probs, labels)
        if info.refitted:
            by_hand, _ = refit(by_hand)
            refits += 1
        for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(by_hand), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert 0 < refits < 101


@every
def test_depth_says_which_intercept_a_column_belongs_to(make):
    estimator = make()
    state = estimator.init()._replace(intercepts=jnp.array([0.0, 1.0, -1.0]))
    features, probs, labels = a_round(estimator)
    columns = jnp.broadcast_to(jnp.arange(3), (4, 3))
    np.testing.assert_array_equal(estimator.predict(state, features), estimator.predict(state, features, depth=columns))
    # Columns 1.. as kept drafts in columns 0..: the same predictions, the same lesson.
    kept, depth = features[:, 1:], columns[:, 1:]
    np.testing.assert_array_equal(
        estimator.predict(state, features)[:, 1:], estimator.predict(state, kept, depth=depth)
    )
    hidden = labels._replace(observed=labels.observed & (columns > 0))
    whole = estimator.observe(state, features, probs, hidden)
    part = estimator.observe(state, kept, probs[:, 1:], Labels(*(x[:, 1:] for x in labels)), depth=depth)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(part), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
    # Depths out of range are clamped.
    np.testing.assert_array_equal(
        estimator.predict(state, features, depth=columns + 7), estimator.predict(state, features, depth=0 * columns + 2)
    )


@every
def test_rows_with_nan_teach_nothing_and_fall_back_to_the_intercept(make):
    estimator = make()
    state = estimator.init()
    features, probs, labels = a_round(estimator)
    soft = labels.accepted.astype(jnp.float32)
    spoiled = [
        (features.at[(1, 2) + (0,) * (features.ndim - 2)].set(jnp.nan), probs, soft),
        (features, probs.at[1, 2].set(jnp.nan), soft),
        (features, probs, soft.at[1, 2].set(jnp.nan)),
    ]
    observed = labels.observed.at[1, 2].set(True)
    expected = estimator.observe(state, features, probs, Labels(labels.accepted, observed.at[1, 2].set(False)))
    for f, p, y in spoiled:
        got = estimator.observe(state, f, p, Labels(y, observed))
        for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
    fallback = estimator.predict(state, spoiled[0][0])[1, 2]
    np.testing.assert_allclose(fallback, jax.nn.sigmoid(state.intercepts[2]), rtol=1e-6)


@every
def test_predictions_stay_inside_the_clip(make):
    estimator = make()
    state = estimator.init()._replace(slopes=jnp.full(len(estimator.features), 9.0))
    for value, wanted in ((jnp.inf, 1 - 2.0**-24), (-jnp.inf, 2.0**-24)):
        features = jnp.full_like(a_round(estimator)[0], value)
        np.testing.assert_array_equal(estimator.predict(state, features), np.float32(wanted))


@every
def test_compiles_once_and_stays_on_the_device(make):
    estimator = make()
    state = estimator.init()
    predict, predict_traces = count_traces(estimator.predict)
    step, step_traces = count_traces(estimator.step)
    for t in range(20):
        features, _, labels = a_round(estimator, t)
        labels = labels._replace(observed=labels.observed & (jnp.arange(4) < t % 5)[:, None])
        state, _ = step(state, features, predict(state, features), labels)
    assert len(predict_traces) == len(step_traces) == 1
    features, probs, labels = a_round(estimator)
    assert_stays_on_device(estimator.predict, state, features)
    assert_stays_on_device(estimator.step, state, features, probs, labels)


@every
def test_vmap_and_half_precision(make):
    estimator = make()
    rounds = [a_round(estimator, t) for t in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *rounds)
    start = estimator.init()
    states, _ = jax.jit(jax.vmap(lambda r: estimator.step(start, *r)))(stacked)
    step = jax.jit(estimator.step)
    for t, one in enumerate(rounds):
        for a, b in zip(jax.tree.leaves(states), jax.tree.leaves(step(start, *one)[0]), strict=True):
            np.testing.assert_allclose(a[t], b, rtol=1e-5, atol=1e-5)
    features, probs, labels = rounds[0]
    state, _ = step(start, features.astype(jnp.bfloat16), probs.astype(jnp.bfloat16), labels)
    same_type(state, start)


@every
def test_without_an_axis_name_each_replica_learns_for_itself(make):
    estimator = make()
    rounds = [a_round(estimator, seed) for seed in range(4)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *rounds)
    starts = jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), estimator.init())

    def learn(state, one):
        state, one = jax.tree.map(lambda leaf: leaf[0], (state, one))
        return jax.tree.map(lambda leaf: leaf[None], estimator.step(state, *one)[0])

    spec, mesh = PartitionSpec("replicas"), Mesh(np.array(jax.devices()[:4]), ("replicas",))
    states = jax.jit(jax.shard_map(learn, mesh=mesh, in_specs=(spec, spec), out_specs=spec))(starts, stacked)
    alone = jax.jit(estimator.step)(estimator.init(), *rounds[3])[0]
    for a, b in zip(jax.tree.leaves(states), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(a[3], b, rtol=1e-5, atol=1e-5)


@every
@pytest.mark.usefixtures("own_checks")
def test_errors_say_what_was_expected(make):
    estimator = make()
    state = estimator.init()
    features, probs, labels = a_round(estimator)
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
