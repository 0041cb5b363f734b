"""online_logistic on hostile streams and on planted ones."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from specav.estimators import online_logistic, vllm_online
from specav.labels import Labels

K = 4
MAX_LOGIT_STEP = 8.0  # the documented default
# Refits come once a round ten times, then every ten rounds: 200 refits.
ROUNDS = 10 + 190 * 10


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def observed_of(accepted):
    """Everything tested; observed up to the first rejection."""
    first = np.ones((*accepted.shape[:-1], 1))
    return np.cumprod(np.concatenate([first, accepted[..., :-1]], axis=-1), axis=-1) > 0


def log_loss(probs, accepted):
    probs = np.clip(np.asarray(probs, np.float64), 2.0**-24, 1 - 2.0**-24)
    return -np.where(accepted, np.log(probs), np.log1p(-probs))


def base_rate(accepted, observed, per_position):
    """The running mean of past labels, (sum + .5) / (n + 1), of each position or of all together."""
    axes = 1 if per_position else (1, 2)
    hits, seen = (accepted & observed).sum(axes), observed.sum(axes)
    rate = (np.cumsum(hits, 0) - hits + 0.5) / (np.cumsum(seen, 0) - seen + 1)
    return np.broadcast_to(rate[:, None, :] if per_position else rate[:, None, None], accepted.shape)


def replay(estimator, features, accepted, observed=None, state=None):
    """Predict, then step, over rounds [R, B, K(, d)]: predictions, and slopes, intercepts and info of every round."""
    observed = observed_of(accepted) if observed is None else observed

    def body(state, inputs):
        f, y, o = inputs
        probs = estimator.predict(state, f)
        state, info = estimator.step(state, f, probs, Labels(y, o))
        return state, (probs, state.slopes, state.intercepts, info)

    state = estimator.init() if state is None else state
    inputs = (jnp.asarray(features, jnp.float32), jnp.asarray(accepted), jnp.asarray(observed))
    return jax.jit(lambda s, x: jax.lax.scan(body, s, x))(state, inputs)


def hostile_streams(batch, seed=0):
    """Name -> (features, accepted), [ROUNDS, batch, K]."""
    rng = np.random.default_rng(seed)
    shape = (ROUNDS, batch, K)
    uniform = lambda: rng.random(shape)  # noqa: E731
    ones, ordinary = np.ones(shape), rng.normal(2.0, 2.5, shape)
    time = np.arange(ROUNDS)[:, None, None]
    mixed = np.where(uniform() < 0.5, 40.0, ordinary)
    signs = np.where(uniform() < 0.5, 40.0, -40.0)
    return {
        "all 40, acceptance .5": (40 * ones, uniform() < 0.5),
        "all 40, acceptance .8": (40 * ones, uniform() < 0.8),
        "all 40, acceptance .97": (40 * ones, uniform() < 0.97),
        "all -40": (-40 * ones, uniform() < 0.3),
        "40 and ordinary, labels independent": (mixed, uniform() < 0.7),
        "40 and ordinary, labels logistic": (mixed, uniform() < np.where(mixed == 40, 0.9, sigmoid(0.6 * mixed - 0.5))),
        "14, acceptance .97": (14 * ones, uniform() < 0.97),
        "14 +- .1, acceptance .97": (14 + rng.normal(0, 0.1, shape), uniform() < 0.97),
        "labels alternate by round": (ordinary, (time + 0 * ones) % 2 == 0),
        "labels alternate by slot": (ordinary, (time + np.arange(batch)[:, None] + np.arange(K)) % 2 == 0),
        "constants, all accepted": (2 * ones, ones > 0),
        "constants, all rejected": (2 * ones, ones < 0),
        "constants, acceptance .6": (0 * ones, uniform() < 0.6),
        "+-40 by slot": (signs, uniform() < 0.8),
        "+-40 by round": (np.where(rng.random((ROUNDS, 1, 1)) < 0.5, 40.0, -40.0) * ones, uniform() < 0.8),
        "+-40 every 10 rounds": (np.where((time // 10) % 2, 40.0, -40.0) * ones, uniform() < 0.8),
        "+-40 every 200 rounds": (np.where((time // 200) % 2, 40.0, -40.0) * ones, uniform() < 0.8),
        "+-40, informative": (signs, uniform() < np.where(signs > 0, 0.95, 0.3)),
        "+-40, misleading": (signs, uniform() < np.where(signs > 0, 0.3, 0.95)),
        "NaN rows": (np.where(uniform() < 0.3, np.nan, ordinary), uniform() < 0.75),
        "Cauchy": (10 * rng.standard_cauchy(shape), uniform() < 0.75),
    }


def assert_steps_bounded(slopes, intercepts, bound, start):
    """No logit at a corner of [-40, 40]^d or at a random point in it ever moved by more than `bound` in a round."""
    slopes = np.concatenate([np.asarray(start.slopes)[None], slopes]).astype(np.float64)
    intercepts = np.concatenate([np.asarray(start.intercepts)[None], intercepts]).astype(np.float64)
    assert np.isfinite(slopes).all() and np.isfinite(intercepts).all()
    d = slopes.shape[1]
    corners = np.array(list(itertools.product([-40.0, 40.0], repeat=d)))
    points = np.concatenate([corners, np.random.default_rng(0).uniform(-40, 40, (20, d))])
    logits = slopes @ points.T  # [rounds, points]
    moves = np.diff(logits[:, :, None] + intercepts[:, None, :], axis=0)
    assert np.abs(moves).max() <= bound, np.abs(moves).max()
    return np.abs(moves).max()


@pytest.fixture(scope="module", params=[32, 1], ids=["batch 32", "batch 1"])
def hostile(request):
    """All streams through one compiled replay."""
    streams = hostile_streams(request.param)
    features = np.stack([f for f, _ in streams.values()]).astype(np.float32)
    accepted = np.stack([y for _, y in streams.values()])
    estimator = online_logistic(K)

    @jax.jit
    @jax.vmap
    def run(features, accepted, observed):
        return replay(estimator, features, accepted, observed)

    state, rounds = run(features, accepted, observed_of(accepted))
    results = jax.tree.map(np.asarray, (state, rounds))
    return {name: (streams[name], jax.tree.map(lambda leaf, i=i: leaf[i], results)) for i, name in enumerate(streams)}


@pytest.mark.parametrize("name", hostile_streams(1))
def test_hostile_streams(hostile, name):
    (features, accepted), (state, (probs, slopes, intercepts, info)) = hostile[name]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((state, info)))
    assert probs.min() >= 2.0**-24 and probs.max() <= 1 - 2.0**-24
    assert_steps_bounded(slopes, intercepts, MAX_LOGIT_STEP, online_logistic(K).init())
    assert info.step_norm.max() <= MAX_LOGIT_STEP

    assert info.refitted.sum() == 200
    refits_before = np.cumsum(info.refitted) - info.refitted
    observed = observed_of(accepted) & ~np.isnan(features)
    for first, bound in ((10, 0.02), (0, 0.06)):
        rounds = refits_before >= first
        chosen = observed[rounds]
        ours = log_loss(probs, accepted)[rounds][chosen].mean()
        # The better of both running base rates.
        rate = min(
            log_loss(base_rate(accepted, observed, per_position), accepted)[rounds][chosen].mean()
            for per_position in (True, False)
        )
        assert ours - rate <= bound, (first, ours, rate)


def test_the_bound_is_an_option_and_binds():
    features = np.full((40, 8, K), 40.0)
    accepted = np.random.default_rng(0).random(features.shape) < 0.1
    estimator = online_logistic(K, max_logit_step=0.5, refit_interval=1)
    _, (_, slopes, intercepts, info) = replay(estimator, features, accepted)
    largest = assert_steps_bounded(slopes, intercepts, 0.5, estimator.init())
    assert np.any(info.limited) and largest > 0.05


def test_collinear_and_saturated_features_are_safe():
    # x, x again, -x, a constant 40 and noise: five slopes, of which the data determine two sums.
    names = ("logit_q_max", "logit_q_sampled", "entropy", "margin", "log_collision")
    rng = np.random.default_rng(1)
    scale = np.array([1.0, 40.0])[:, None, None, None]
    x = rng.normal(size=(2, 600, 16, K)) * scale
    features = np.stack([x, x, -x, 0 * x + 40, rng.normal(size=x.shape)], axis=-1).astype(np.float32)
    accepted = rng.random(x.shape) < sigmoid(0.7 * np.clip(x, -40, 40) + 0.5)
    estimator = online_logistic(K, names)
    _, (probs, slopes, intercepts, _) = jax.vmap(lambda f, y, o: replay(estimator, f, y, o))(
        features, accepted, observed_of(accepted)
    )
    _, (alone, *_) = jax.vmap(lambda f, y, o: replay(online_logistic(K), f, y, o))(
        x.astype(np.float32), accepted, observed_of(accepted)
    )
    for i in range(2):
        assert_steps_bounded(slopes[i], intercepts[i], MAX_LOGIT_STEP, estimator.init())
        observed = observed_of(accepted[i])[300:]
        five, one = (log_loss(p[i], accepted[i])[300:][observed].mean() for p in (probs, alone))
        assert five < one + 2e-3


def planted(kind, rounds, batch, seed):
    """Features (a long right tail, as of logit q_max), labels and true probabilities, with coefficients that move."""
    rng = np.random.default_rng(seed)
    shape = (rounds, batch, K)
    features = rng.gamma(1.2, 2.2, shape) - 1.0
    features = np.where(rng.random(shape) < 0.05, rng.uniform(10, 30, shape), features)
    time, intercepts = np.arange(rounds), np.tile([0.3, 0.1, -0.1, -0.3], (rounds, 1))
    slopes = np.full(rounds, 0.45)
    if kind == "walk":
        slopes = 0.45 + 0.2 * np.sin(2 * np.pi * time / 2000 + rng.uniform(0, 6))
        intercepts = np.clip(intercepts + np.cumsum(rng.normal(0, 0.01, (rounds, K)), 0), -2, 2)
    if kind == "switch":
        phase = (time // 300) % 3
        slopes = np.array([0.45, 0.7, 0.2])[phase]
        intercepts = intercepts + np.array([0.0, -1.0, 1.0])[phase][:, None]
    probs = sigmoid(slopes[:, None, None] * features + intercepts[:, None, :])
    return features, rng.random(shape) < probs, probs


@pytest.mark.parametrize(
    ("batch", "shares"),
    [
        (16, {"still": 0.8, "walk": 0.8, "switch": 0.4}),
        # "walk" moves as fast as one request a round can teach: there the two are about equal.
        (1, {"still": 0.9, "walk": 1.1, "switch": 0.8}),
    ],
)
def test_beats_vllm_online_with_the_same_feature(batch, shares):
    # Log-loss above that of the true probabilities, in expectation over the labels; "switch" changes the workload.
    data = [planted(kind, 2000, batch, seed) for kind in shares for seed in range(4)]
    features, accepted, truth = (np.stack(arrays) for arrays in zip(*data, strict=True))
    observed = observed_of(accepted)
    excess = []
    for make in (online_logistic, vllm_online):
        run = jax.jit(jax.vmap(lambda f, y, o, make=make: replay(make(K), f, y, o)[1][0]))
        probs = np.asarray(run(features.astype(np.float32), accepted, observed), np.float64)
        gap = truth * np.log(truth / probs) + (1 - truth) * np.log((1 - truth) / (1 - probs))
        means = [each[seen].mean() for each, seen in zip(gap, observed, strict=True)]
        excess.append(np.reshape(means, (3, 4)).mean(axis=1))
    for kind, ours, theirs in zip(shares, *excess, strict=True):
        assert ours < shares[kind] * theirs, (kind, ours, theirs)


def test_recovers_planted_coefficients_of_two_features_from_censored_data():
    rng = np.random.default_rng(3)
    features = rng.normal([2.0, 1.0], [2.0, 1.0], (1500, 16, K, 2))
    intercepts = np.array([0.6, 0.2, -0.3, -0.6])
    accepted = rng.random((1500, 16, K)) < sigmoid(features @ [0.8, -0.5] + intercepts)
    state, _ = replay(online_logistic(K, ("logit_q_max", "entropy")), features, accepted)
    np.testing.assert_allclose(state.slopes, [0.8, -0.5], atol=0.1)
    np.testing.assert_allclose(state.intercepts, intercepts, atol=0.3)


def test_soft_labels_teach_the_same_with_less_noise():
    features, hard, truth = planted("still", 400, 4, seed=4)
    errors = {}
    for name, labels in (("hard", hard), ("soft", truth.astype(np.float32))):
        state, _ = replay(online_logistic(K), features, labels, observed_of(hard))
        fitted = np.concatenate([state.slopes, state.intercepts])
        errors[name] = np.abs(fitted - [0.45, 0.3, 0.1, -0.1, -0.3]).max()
    assert errors["soft"] < 0.05 and errors["soft"] < errors["hard"]


def test_quiet_positions_neither_explode_nor_freeze():
    # The last position is tested in every 50th round only. Its acceptance is .2; after round 2000 it is .8.
    rng = np.random.default_rng(5)
    features = rng.normal(2.0, 1.0, (6000, 4, 2))
    rates = np.stack([np.full(6000, 0.7), np.where(np.arange(6000) < 2000, 0.2, 0.8)], axis=-1)
    accepted = rng.random(features.shape) < rates[:, None, :]
    observed = np.ones(features.shape, bool)
    observed[..., 1] = (np.arange(6000) % 50 == 0)[:, None]
    _, (_, slopes, intercepts, _) = replay(online_logistic(2), features, accepted, observed)
    quiet = np.asarray(slopes[:, 0] * 2.0 + intercepts[:, 1])
    assert np.abs(quiet).max() < 4
    assert abs(quiet[1900:2000].mean() - np.log(0.2 / 0.8)) < 0.7
    assert abs(quiet[5900:].mean() - np.log(0.8 / 0.2)) < 0.7


def test_an_unseen_position_moves_like_the_others():
    features = np.random.default_rng(6).normal(2.0, 1.0, (200, 8, 3))
    accepted = np.random.default_rng(7).random(features.shape) < 0.3
    observed = np.ones(features.shape, bool)
    observed[..., 2] = False
    state, _ = replay(online_logistic(3), features, accepted, observed)
    at_two = np.asarray(state.slopes[0] * 2.0 + state.intercepts)
    assert abs(at_two[2] - at_two[:2].mean()) < 0.2


def test_rounds_without_labels_change_no_prediction():
    features, accepted, _ = planted("still", 200, 4, seed=8)
    estimator = online_logistic(K)
    before, _ = replay(estimator, features, accepted)
    after, _ = replay(estimator, features, accepted, np.zeros(accepted.shape, bool), before)
    for name in ("slopes", "intercepts", "statistics", "log_drift", "innovation"):
        for a, b in zip(jax.tree.leaves(getattr(before, name)), jax.tree.leaves(getattr(after, name)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
    assert np.asarray(before.slopes).tobytes() == np.asarray(after.slopes).tobytes()


@pytest.mark.parametrize("make", [online_logistic, vllm_online])
def test_the_future_leaves_no_trace_in_past_predictions(make):
    features, accepted, _ = planted("still", 300, 4, seed=9)
    run = lambda y: replay(make(K), features, y, np.ones(y.shape, bool))  # noqa: E731
    _, (honest, *_) = run(accepted)
    flipped = accepted.copy()
    flipped[150:] = ~flipped[150:]
    _, (other, *_) = run(flipped)
    # The labels of round 150 are learned after its prediction.
    assert np.asarray(honest[:151]).tobytes() == np.asarray(other[:151]).tobytes()
    assert not np.array_equal(honest[201:], other[201:])


def test_replicas_hold_the_same_bits():
    features, accepted, _ = planted("walk", 120, 8, seed=10)
    features = np.stack([features, np.abs(features)], axis=-1).astype(np.float32)
    names = ("logit_q_max", "entropy")
    estimator = online_logistic(K, names, axis_name="replicas")

    def learn(features, accepted, observed):
        state, _ = replay(estimator, features, accepted, observed)
        return jax.tree.map(lambda leaf: leaf[None], state)

    split, mesh = PartitionSpec(None, "replicas"), Mesh(np.array(jax.devices()[:4]), ("replicas",))
    sharded = jax.shard_map(learn, mesh=mesh, in_specs=(split,) * 3, out_specs=PartitionSpec("replicas"))
    copies = jax.jit(sharded)(features, accepted, observed_of(accepted))
    for leaf in jax.tree.leaves(copies):
        assert len({np.asarray(copy).tobytes() for copy in leaf}) == 1
    alone, _ = replay(online_logistic(K, names), features, accepted)
    np.testing.assert_allclose(copies.slopes[0], alone.slopes, atol=1e-3)
    np.testing.assert_allclose(copies.intercepts[0], alone.intercepts, atol=1e-3)


@pytest.mark.usefixtures("own_checks")
def test_options_are_checked():
    with pytest.raises(ValueError, match="'nonsense'"):
        online_logistic(3, ("nonsense",))
    with pytest.raises(ValueError, match="at least one name, none twice"):
        online_logistic(3, ("entropy", "entropy"))
    with pytest.raises(ValueError, match="cold_slopes: expected 1 slopes, got 2"):
        online_logistic(3, cold_slopes=(1.0, 2.0))
    with pytest.raises(ValueError, match="refit_interval: expected an int of at least 1, got 0"):
        online_logistic(3, refit_interval=0)
    with pytest.raises(ValueError, match="max_logit_step: expected a number in"):
        online_logistic(3, max_logit_step=float("nan"))
    assert online_logistic(3, ("entropy",)).depends_on == "prefix"
    assert online_logistic(3, ("entropy", "logit_q_sampled")).depends_on == "draw"
