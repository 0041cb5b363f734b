"""vLLM's online acceptance estimator, formula for formula: the reference that others are measured against.

p = sigmoid(w . f + b_k) with f = log q_max / (1 - q_max), one slope and an intercept per position. A Newton step every
100 rounds, on that window alone. The formulas are in `refit` below; what differs from the serving engine: features
come from `specav.features`, which keeps the range of log-odds beyond 15.9 that a float32 `sumexp - 1` loses.

Known faults, kept on purpose (`specav.estimators.online` has none of them): saturated features make sum p(1 - p)
vanish, and the step explodes; everything is forgotten at every refit.
"""

from typing import Any

import jax.numpy as jnp

from specav._checks import static_int
from specav.estimators import base
from specav.estimators.arrowhead import accumulate, empty_statistics, intercept_steps, schur_complement
from specav.labels import Labels

COLD_SLOPE = 0.5
COLD_INTERCEPT = -0.2
REFIT_INTERVAL = 100  # rounds
RIDGE = 1e-3
DAMPING = 50.0  # labels; a step counts n / (n + 50)


def vllm_online(num_positions: int, *, axis_name: str | None = None) -> base.AcceptanceEstimator:
    """vLLM's estimator: feature `logit_q_max`, cold start w = .5 and b = -.2, a refit every 100 rounds.

    With v = p(1 - p) from the predictions handed to `observe` (those made at draft time), g = y - p, n_k labels at
    position k and N in all, ridge l = 1e-3, a refit does

        dw   = N / (N + 50) * (r - sum_k B_k s_k / (C_k + l)) / (A + l - sum_k B_k^2 / (C_k + l))
        dw   = 0 if it is NaN or w + dw < 0
        db_k = n_k / (n_k + 50) * (s_k - B_k dw) / (C_k + l),  0 if NaN

    with the letters of `specav.estimators.arrowhead`, and zeroes the statistics. The ridge does not pull the
    coefficients anywhere. `info.limited` says that the slope step was dropped or an intercept step was NaN.

    Args:
      num_positions: K, draft positions.
      axis_name: mapped axis (inside `shard_map` or `pmap`) over which requests are split. Sums run over it in
        `observe`, so that all replicas hold the same state.

    Returns:
      An `AcceptanceEstimator` of class "prefix"; its state is a `LogisticState` (slopes [1], intercepts [K]).

    Raises:
      TypeError, ValueError: num_positions is not an int of at least 1.

    References:
      vLLM, adaptive verification of speculative decoding (online acceptance estimator).
    """
    num_positions = static_int("num_positions", num_positions, 1)

    def init() -> base.LogisticState:
        return base.initial_state(num_positions, (COLD_SLOPE,), COLD_INTERCEPT)

    def observe(state: base.LogisticState, features: Any, probs: Any, labels: Labels, depth: Any = None):
        batch = base.check_batch(features, probs, labels, depth, num_positions, 1)
        statistics = accumulate(
            state.statistics,
            batch.features,
            batch.probs * (1.0 - batch.probs),
            batch.accepted - batch.probs,
            batch.depth,
            batch.observed,
            axis_name=axis_name,
        )
        gap = state.gap + base.observation_gap(batch, axis_name)
        return state._replace(statistics=statistics, gap=gap, rounds=state.rounds + 1)

    def refit(state: base.LogisticState):
        statistics = state.statistics
        count = statistics.count
        total = jnp.sum(count)
        matrix, vector = schur_complement(statistics, RIDGE)
        slope_step = vector / matrix[0] * (total / (total + DAMPING))
        dropped = jnp.isnan(slope_step) | (state.slopes + slope_step < 0.0)
        slope_step = jnp.where(dropped, 0.0, slope_step)
        steps = intercept_steps(statistics, slope_step, RIDGE) * (count / (count + DAMPING))
        undefined = jnp.isnan(steps)
        steps = jnp.where(undefined, 0.0, steps)
        norm = base.MAX_FEATURE * jnp.sum(jnp.abs(slope_step)) + jnp.max(jnp.abs(steps))
        info = base.report(state, True, norm, jnp.any(dropped) | jnp.any(undefined))
        state = state._replace(
            slopes=state.slopes + slope_step,
            intercepts=state.intercepts + steps,
            statistics=empty_statistics(num_positions, 1),
            gap=jnp.zeros_like(state.gap),
            rounds=jnp.zeros_like(state.rounds),
            num_refits=state.num_refits + 1,
        )
        return state, info

    def due(state: base.LogisticState):
        return state.rounds >= REFIT_INTERVAL

    return base.estimator(init, observe, refit, due, "prefix", ("logit_q_max",))
