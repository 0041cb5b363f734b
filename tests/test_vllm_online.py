"""vllm_online against its formulas, written out a second time in float64 loops that share nothing with the library."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from specav.estimators import vllm_online
from specav.estimators.arrowhead import (
    accumulate,
    empty_statistics,
    intercept_steps,
    normal_equations,
    schur_complement,
)
from specav.labels import Labels


class Reference:
    """The estimator in plain Python floats."""

    def __init__(self, positions, slope=0.5, intercept=-0.2):
        self.slope, self.intercepts, self.positions = slope, [intercept] * positions, positions
        self.rounds, self.dropped = 0, 0
        self.zero()

    def zero(self):
        self.a, self.r, self.n = 0.0, 0.0, [0] * self.positions
        self.b, self.c, self.s = ([0.0] * self.positions for _ in range(3))

    def predict(self, f, k):
        return 1.0 / (1.0 + math.exp(-(self.slope * f + self.intercepts[k])))

    def observe(self, features, probs, accepted, observed):
        for row in range(len(features)):
            for k in range(self.positions):
                if observed[row][k]:
                    f, p, y = float(features[row][k]), probs[row][k], float(accepted[row][k])
                    self.a += p * (1 - p) * f * f
                    self.b[k] += p * (1 - p) * f
                    self.c[k] += p * (1 - p)
                    self.r += (y - p) * f
                    self.s[k] += y - p
                    self.n[k] += 1
        self.rounds += 1
        if self.rounds % 100 == 0:
            self.refit()

    def refit(self):
        top, bottom = self.r, self.a + 1e-3
        for k in range(self.positions):
            top -= self.b[k] * self.s[k] / (self.c[k] + 1e-3)
            bottom -= self.b[k] * self.b[k] / (self.c[k] + 1e-3)
        total = sum(self.n)
        step = top / bottom * total / (total + 50)
        if math.isnan(step) or self.slope + step < 0:
            step, self.dropped = 0.0, self.dropped + 1
        for k in range(self.positions):
            move = (self.s[k] - self.b[k] * step) / (self.c[k] + 1e-3) * self.n[k] / (self.n[k] + 50)
            self.intercepts[k] += 0.0 if math.isnan(move) else move
        self.slope += step
        self.zero()


def stream(seed, rounds, batch, positions, acceptance, informative, spread=15.0):
    """Random rounds with ragged censoring: features float32 and labels, [rounds, batch, positions]."""
    rng = np.random.default_rng(seed)
    shape = (rounds, batch, positions)
    features = rng.uniform(-spread, spread, shape).astype(np.float32)
    base = math.log(acceptance / (1 - acceptance))
    logits = base + informative * 0.3 * features
    accepted = rng.random(shape) < 1 / (1 + np.exp(-logits))
    tested = rng.integers(0, positions + 1, (rounds, batch, 1))
    before = np.cumprod(np.concatenate([np.ones((*shape[:2], 1)), accepted[..., :-1]], -1), -1)
    observed = (np.arange(positions) < tested) & (before > 0)
    return features, accepted, observed


def run(estimator, features, accepted, observed, state=None):
    """Predict, then step, over all rounds; the state after each round."""

    def body(state, inputs):
        f, y, o = inputs
        state, info = estimator.step(state, f, estimator.predict(state, f), Labels(y, o))
        return state, (state.slopes, state.intercepts, info)

    state = estimator.init() if state is None else state
    return jax.jit(lambda s, x: jax.lax.scan(body, s, x))(state, (features, accepted, observed))


@pytest.mark.parametrize(
    ("seed", "acceptance", "informative", "positions"),
    [(0, 0.5, 1.0, 4), (1, 0.97, 1.0, 3), (2, 0.8, 0.0, 4), (3, 0.97, 0.0, 1), (4, 0.7, -0.5, 3), (5, 0.9, 2.0, 7)],
)
def test_equals_the_reference_over_fifty_refits(seed, acceptance, informative, positions):
    features, accepted, observed = stream(seed, 5000, 3, positions, acceptance, informative)
    reference, expected = Reference(positions), []
    for f, y, o in zip(features.tolist(), accepted.tolist(), observed.tolist(), strict=True):
        probs = [[reference.predict(value, k) for k, value in enumerate(row)] for row in f]
        reference.observe(f, probs, y, o)
        expected.append([reference.slope, *reference.intercepts])
    _, (slopes, intercepts, info) = run(vllm_online(positions), features, accepted, observed)
    assert int(np.sum(info.refitted)) == 50
    np.testing.assert_array_equal(np.flatnonzero(info.refitted), np.arange(99, 5000, 100))
    got = np.concatenate([slopes, intercepts], axis=1)
    np.testing.assert_allclose(got, np.array(expected), rtol=0, atol=1e-4)
    if informative < 0:
        assert reference.dropped > 0


def test_tight_features_do_not_cancel():
    # Position k sees features of 14 - 3k +- .05: the textbook A - sum B B / C has no float32 digits left here.
    rng = np.random.default_rng(7)
    offset = rng.uniform(-0.05, 0.05, (100, 32, 3))
    features = (offset + np.array([14.0, 11.0, 8.0])).astype(np.float32)
    accepted = rng.random(features.shape) < 1 / (1 + np.exp(-1.0 - 40 * offset))
    probs = np.full(features.shape, 0.75, np.float32)
    reference, estimator = Reference(3), vllm_online(3)
    state, step = estimator.init(), jax.jit(estimator.step)
    for t in range(100):
        reference.observe(features[t], probs[t].tolist(), accepted[t], np.ones((32, 3), bool))
        state, _ = step(state, features[t], probs[t], Labels(accepted[t], np.ones((32, 3), bool)))
    assert reference.slope > 10
    got, expected = [*state.slopes, *state.intercepts], [reference.slope, *reference.intercepts]
    np.testing.assert_allclose(got, expected, rtol=1e-4)


def test_predictions_of_draft_time_are_the_weights():
    # Predictions that are not those of the present coefficients: they, and not new ones, enter the equations.
    features, accepted, observed = stream(8, 100, 4, 2, 0.7, 1.0)
    probs = np.random.default_rng(9).uniform(0.1, 0.9, features.shape).astype(np.float32)
    reference, estimator = Reference(2), vllm_online(2)
    state, step = estimator.init(), jax.jit(estimator.step)
    for t in range(100):
        reference.observe(features[t], probs[t].tolist(), accepted[t], observed[t])
        state, info = step(state, features[t], probs[t], Labels(accepted[t], observed[t]))
    np.testing.assert_allclose(
        [*state.slopes, *state.intercepts], [reference.slope, *reference.intercepts], rtol=0, atol=1e-4
    )
    shown = np.mean(probs[observed]) - np.mean(accepted[observed])
    np.testing.assert_allclose(info.calibration_gap, shown, atol=1e-5)
    assert float(info.num_observed) == observed.sum()


def test_recovers_planted_coefficients_from_censored_data():
    rng = np.random.default_rng(10)
    planted = np.array([0.6, 0.2, -0.3, -0.6])
    features = rng.normal(2.0, 2.0, (3000, 16, 4)).astype(np.float32)
    accepted = rng.random(features.shape) < 1 / (1 + np.exp(-(0.8 * features + planted)))
    before = np.cumprod(np.concatenate([np.ones((3000, 16, 1)), accepted[..., :-1]], -1), -1)
    state, _ = run(vllm_online(4), features, accepted, before > 0)
    np.testing.assert_allclose(state.slopes, [0.8], atol=0.1)
    np.testing.assert_allclose(state.intercepts, planted, atol=0.3)


def one_refit(features, accepted, observed):
    """The cold state after one round and a refit."""
    estimator = vllm_online(features.shape[1])

    def learn(f, y, o):
        state = estimator.init()
        return estimator.refit(estimator.observe(state, f, estimator.predict(state, f), Labels(y, o)))

    return jax.jit(learn)(features, accepted, observed)


def test_a_position_never_observed_stays_bit_identical():
    features, accepted, observed = stream(11, 500, 4, 3, 0.8, 1.0)
    observed[..., 1] = False
    state, _ = run(vllm_online(3), features, accepted, observed)
    assert np.asarray(state.intercepts)[1].tobytes() == np.float32(-0.2).tobytes()
    assert not np.any(np.asarray(state.intercepts)[[0, 2]] == np.float32(-0.2))


def test_a_negative_slope_is_refused_and_intercepts_use_the_refusal():
    features = jnp.tile(jnp.array([[-2.0], [2.0]]), (200, 1))
    accepted = features < 0  # the lower the feature, the better
    state, info = one_refit(features, accepted, jnp.ones_like(accepted))
    assert float(state.slopes[0]) == 0.5 and bool(info.limited)
    probs = 1 / (1 + np.exp(0.2 - 0.5 * np.asarray(features, np.float64)))
    alone = (0.5 - probs).sum() / ((probs * (1 - probs)).sum() + 1e-3) * 400 / 450
    np.testing.assert_allclose(state.intercepts[0], -0.2 + alone, atol=1e-5)


def test_steps_scale_with_the_number_of_labels():
    # Twice the same labels: the undamped step is the same (but for the ridge), the damped one is n / (n + 50) of it.
    features = jnp.array([[1.0, -1.0], [3.0, 0.5], [-2.0, 2.0], [0.0, 1.0]])
    accepted = jnp.array([[1, 0], [1, 1], [0, 1], [0, 0]], bool)
    undamped = []
    for times in (5, 10, 400):
        f, y = jnp.tile(features, (times, 1)), jnp.tile(accepted, (times, 1))
        state, _ = one_refit(f, y, jnp.ones_like(y))
        total, each = 8 * times, 4 * times
        undamped.append(float(state.slopes[0] - 0.5) * (total + 50) / total)
        # Intercepts move by what the damped slope step leaves over, damped by their own counts.
        probs = 1 / (1 + np.exp(0.2 - 0.5 * np.asarray(f, np.float64)))
        v, g = probs * (1 - probs), np.asarray(y) - probs
        moves = (g.sum(0) - (v * np.asarray(f)).sum(0) * float(state.slopes[0] - 0.5)) / (v.sum(0) + 1e-3)
        np.testing.assert_allclose(np.asarray(state.intercepts) + 0.2, moves * each / (each + 50), atol=2e-5)
    np.testing.assert_allclose(undamped[0], undamped[2], rtol=2e-3)
    np.testing.assert_allclose(undamped[1], undamped[2], rtol=2e-3)


def test_statistics_are_zeroed_and_nan_rows_are_dropped():
    features, accepted, observed = (jnp.asarray(x[0]) for x in stream(12, 1, 64, 3, 0.8, 1.0))
    clean, _ = one_refit(features, accepted, observed)
    assert not any(np.any(np.asarray(leaf)) for leaf in jax.tree.leaves(clean.statistics))
    poisoned = jnp.concatenate([features, jnp.full((2, 3), jnp.nan)])
    more = jnp.concatenate([observed, jnp.ones((2, 3), bool)])
    same, _ = one_refit(poisoned, jnp.concatenate([accepted, jnp.ones((2, 3), bool)]), more)
    np.testing.assert_allclose(same.slopes, clean.slopes, rtol=1e-6)
    np.testing.assert_allclose(same.intercepts, clean.intercepts, rtol=1e-5)
    probs = vllm_online(3).predict(clean, poisoned)
    np.testing.assert_allclose(probs[-1], jax.nn.sigmoid(clean.intercepts), rtol=1e-6)


def test_statistics_are_the_normal_equations_and_solve_them_exactly():
    # Three features, four positions, depths out of order, three batches: against dense float64 sums and a dense solve.
    rng = np.random.default_rng(13)
    statistics, rows = empty_statistics(4, 3), []
    for _ in range(3):
        f = rng.normal([1.0, -5.0, 20.0], [1.0, 2.0, 3.0], (6, 5, 3)).astype(np.float32)
        v, g = rng.uniform(0.01, 0.25, (6, 5)).astype(np.float32), rng.normal(size=(6, 5)).astype(np.float32)
        depth, seen = rng.integers(0, 4, (6, 5)).astype(np.int32), rng.random((6, 5)) < 0.7
        statistics = accumulate(statistics, *map(jnp.asarray, (f, v, g, depth, seen)))
        rows += [(f[i], v[i], g[i], depth[i]) for i in zip(*np.nonzero(seen), strict=True)]
    matrix, vector, ridge = np.zeros((7, 7)), np.zeros(7), 1e-3
    for f, v, g, k in rows:
        x = np.concatenate([f.astype(np.float64), np.eye(4)[k]])
        matrix += v * np.outer(x, x)
        vector += g * x
    system = normal_equations(statistics)
    np.testing.assert_allclose(system.slopes, matrix[:3, :3], rtol=1e-5)
    np.testing.assert_allclose(system.coupling, matrix[3:, :3], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(system.intercepts, np.diag(matrix)[3:], rtol=1e-5)
    np.testing.assert_allclose(system.slope_gradient, vector[:3], rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(system.intercept_gradient, vector[3:], rtol=1e-4, atol=1e-4)
    exact = np.linalg.solve(matrix + ridge * np.eye(7), vector)
    schur, right = schur_complement(statistics, ridge)
    np.testing.assert_allclose(np.linalg.solve(np.float64(schur), np.float64(right)), exact[:3], rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(
        intercept_steps(statistics, jnp.asarray(exact[:3], jnp.float32), ridge), exact[3:], rtol=1e-3, atol=1e-3
    )
    assert float(jnp.sum(statistics.count)) == len(rows)


def test_replicas_hold_the_same_bits_and_learn_from_all_requests():
    features, accepted, observed = stream(14, 300, 8, 3, 0.8, 1.0)
    mesh = Mesh(np.array(jax.devices()[:4]), ("replicas",))
    estimator = vllm_online(3, axis_name="replicas")

    def learn(features, accepted, observed):
        def body(state, inputs):
            f, y, o = inputs
            return estimator.step(state, f, estimator.predict(state, f), Labels(y, o))[0], None

        state, _ = jax.lax.scan(body, estimator.init(), (features, accepted, observed))
        return jax.tree.map(lambda leaf: leaf[None], state)  # one copy per device

    split = PartitionSpec(None, "replicas")
    sharded = jax.jit(jax.shard_map(learn, mesh=mesh, in_specs=(split,) * 3, out_specs=PartitionSpec("replicas")))
    copies = sharded(features, accepted, observed)
    for leaf in jax.tree.leaves(copies):
        assert leaf.shape[0] == 4
        assert len({np.asarray(copy).tobytes() for copy in leaf}) == 1
    alone, _ = run(vllm_online(3), features, accepted, observed)
    np.testing.assert_allclose(copies.slopes[0], alone.slopes, rtol=1e-4)
    np.testing.assert_allclose(copies.intercepts[0], alone.intercepts, atol=1e-4)
