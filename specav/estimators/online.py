"""Online logistic regression that keeps what it learned and never takes a wild step.

p = sigmoid(w . f + b_k): d shared slopes, K intercepts. What is known about the coefficients is a Gaussian around the
present ones, whose precision has the arrowhead shape of `specav.estimators.arrowhead`: an extended Kalman filter in
information form. A refit is one Newton step on the labels since the last refit, against the precision of everything
remembered; then the memory fades a little, as if the coefficients had drifted.

About the mean feature m_k of each position the system is block diagonal (the Schur complement is the scatter), and
the step is taken there: slopes by d x d Cholesky, then the shift of each position's logit at its mean feature. That is
exact, and it is what makes the step safe: a feature without spread moves no slope, however far from zero it sits.

What keeps a step safe, in the order applied:

* residuals and weights are those of the present coefficients, computed without cancellation, never exactly 0;
* `floor` labels' worth of information stands in for what is not known;
* a Newton step of size x is damped to log(1 + x), which a logistic loss is guaranteed to follow downhill;
* no logit moves by more than `max_logit_step`, at any feature in +-40; slopes use at most 3/4 of that. Where this cuts
  a step, the quadratic does not hold so far out, and the same share of the remembered information is dropped.

References:
  Fahrmeir, Posterior mode estimation by extended Kalman filtering for multivariate dynamic generalized linear
    models, JASA 87, 1992.
  Bach, Self-concordant analysis for logistic regression, Electronic Journal of Statistics 4, 2010 (the damping).
  Mehra, Approaches to adaptive filtering, IEEE Transactions on Automatic Control 17, 1972 (the drift rate).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specav._checks import static_float, static_int
from specav.estimators import base
from specav.estimators.arrowhead import ArrowheadStatistics, accumulate, solve_positive
from specav.features import feature_class

WARMUP_REFITS = 10  # the first refits come one a round
COLD_LOG_ODDS_SLOPE = 0.06  # small: a feature stuck at 40 must not start at a logit of 20
SLOPE_SHARE = 0.75  # of max_logit_step
DRIFT_GAIN, DRIFT_RETURN, DRIFT_RANGE = 0.3, 0.03, 5.0  # in log drift, a refit


class OnlineState(NamedTuple):
    """State of `online_logistic`: a `LogisticState`, and what tunes its memory.

    Attributes:
      slopes: float32 [d].
      intercepts: float32 [K].
      statistics: precision of everything remembered; residuals since the last refit only.
      gap: float32 [], sum of (prediction - label) since the last refit.
      rounds: int32 [], rounds since the last refit.
      num_refits: int32 [].
      remembered: float32 [K], statistics.weight right after the last refit.
      innovation: float32 [K], standardised residuals of the last window with labels.
      log_drift: float32 [], log of the present drift rate over the given one.
    """

    slopes: Float[Array, " d"]
    intercepts: Float[Array, " K"]
    statistics: ArrowheadStatistics
    gap: Float[Array, ""]
    rounds: Int[Array, ""]
    num_refits: Int[Array, ""]
    remembered: Float[Array, " K"]
    innovation: Float[Array, " K"]
    log_drift: Float[Array, ""]


def online_logistic(
    num_positions: int,
    features: Sequence[str] = ("logit_q_max",),
    *,
    refit_interval: int = 10,
    max_logit_step: float = 8.0,
    drift: float = 1e-4,
    floor: float = 1.0,
    ridge: float = 0.02,
    cold_slopes: Sequence[float] | None = None,
    cold_intercept: float = 0.7,
    axis_name: str | None = None,
) -> base.AcceptanceEstimator:
    """A safe online logistic regression on any of the registered features.

    The predictions handed to `observe` only enter `info.calibration_gap`; what is fitted are residuals at the present
    coefficients. A position that is rarely tested keeps what it knows, and as far as it knows nothing its logit moves
    like the average of the others.

    Args:
      num_positions: K, draft positions.
      features: names in `specav.FEATURES`.
      refit_interval: rounds between refits. The first ten refits come one a round, whatever the interval.
      max_logit_step: bound on the change of any logit w . f + b_k in one refit, over all features in +-40.
      drift: variance that a logit is expected to gain in a round, which sets how fast memory fades. Only a start: the
        rate used grows by a third per refit while windows keep erring to the same side, shrinks while they alternate
        (within e^-5 .. e^5 times `drift`), and returns to it in the absence of evidence. 0: never forget.
      floor: information (in units of sum p(1 - p), and of slopes) added to what is known; damps the first steps.
      ridge: every label counts as `ridge` labels' worth of evidence, at one unit of feature, that the slopes are 0.
        Slopes that the data do not determine (constant or collinear features) shrink, at unchanged mean prediction.
      cold_slopes: d initial slopes; default .06 shared by the features that are log-odds of one token, 0 elsewhere.
      cold_intercept: initial intercept of every position.
      axis_name: mapped axis (inside `shard_map` or `pmap`) over which requests are split. Sums run over it in
        `observe`, so that all replicas hold the same state.

    Returns:
      An `AcceptanceEstimator` of the class of its features. Its state is an `OnlineState`.
      `info.limited` says that max_logit_step cut a step (or that a slope step was undefined, and dropped).

    Raises:
      TypeError, ValueError: an unknown feature, or an option out of its range.
    """
    num_positions = static_int("num_positions", num_positions, 1)
    refit_interval = static_int("refit_interval", refit_interval, 1)
    max_logit_step = static_float("max_logit_step", max_logit_step, 1e-3, 1e3)
    drift = static_float("drift", drift, 0.0, 1.0)
    floor = static_float("floor", floor, 1e-3, 1e6)
    ridge = static_float("ridge", ridge, 0.0, 1e3)
    cold_intercept = static_float("cold_intercept", cold_intercept, -base.MAX_FEATURE, base.MAX_FEATURE)
    features = _names(features)
    cold_slopes = _cold_slopes(features, cold_slopes)
    eye = jnp.eye(len(features), dtype=jnp.float32)

    def init():
        state = base.initial_state(num_positions, cold_slopes, cold_intercept)
        zero = jnp.zeros((num_positions,), jnp.float32)
        return OnlineState(*state, remembered=zero, innovation=zero, log_drift=jnp.zeros((), jnp.float32))

    def observe(state, features, probs, labels, depth=None):
        batch = base.check_batch(features, probs, labels, depth, num_positions, eye.shape[0])
        up, down = base.both_probabilities(base.logits_of(state, batch.features, batch.depth))
        residuals = batch.accepted * down - (1.0 - batch.accepted) * up
        statistics = accumulate(
            state.statistics, batch.features, up * down, residuals, batch.depth, batch.observed, axis_name=axis_name
        )
        gap = state.gap + base.observation_gap(batch, axis_name)
        return state._replace(statistics=statistics, gap=gap, rounds=state.rounds + 1)

    def refit(state):
        known = state.statistics
        learned = jnp.sum(known.count) > 0
        fresh = jnp.maximum(known.weight - state.remembered, 0.0)
        innovation = known.residual / jnp.sqrt(fresh + 1.0)
        log_drift = _adapted(state, innovation)

        # Slopes.
        shrink = ridge * jnp.sum(fresh)
        scatter = known.scatter + shrink * eye
        wanted = solve_positive(scatter + floor * eye, known.slope_residual - shrink * state.slopes)
        undefined = ~jnp.all(jnp.isfinite(wanted))
        wanted = jnp.where(learned & ~undefined, wanted, 0.0)
        # The typical change of a logit that it stands for, and the largest: about the means m_k, so |f - m| < 40 + |m|.
        total = jnp.sum(known.weight)
        typical = jnp.sqrt(_safe_ratio(wanted @ scatter @ wanted, total))
        wanted = wanted * _safe_ratio(jnp.log1p(typical), typical, 1.0)
        precision = known.weight + floor
        pooled = _safe_ratio(known.weight @ known.mean, total)
        mean = (known.weight[:, None] * known.mean + floor * pooled[None, :]) / precision[:, None]
        reach = (base.MAX_FEATURE + jnp.abs(mean)) @ jnp.abs(wanted)
        limit = 0.999 * max_logit_step  # a little room for rounding
        slope_share = jnp.minimum(1.0, _safe_ratio(SLOPE_SHARE * limit, jnp.max(reach), 1.0))
        slope_step, reach = slope_share * wanted, slope_share * reach

        # Logits at the mean features; what is not known about a position follows the others.
        follow = jnp.sum(known.residual) / (total + floor)
        wanted = (known.residual + floor * follow) / precision
        wanted = jnp.sign(wanted) * jnp.log1p(jnp.abs(wanted))
        shift = jnp.clip(wanted, reach - limit, limit - reach)
        share = _safe_ratio(shift, wanted, 1.0)
        intercept_step = shift - mean @ slope_step

        # Precision 1/P fades to 1/(P + drift): busy positions forget old labels for new ones, quiet ones hardly.
        # Slopes drift by as much, measured at features of the spread that was seen: scatter / total is the variance.
        pace = jnp.where(learned, drift * jnp.exp(log_drift) * state.rounds.astype(jnp.float32), 0.0)
        fade = 1.0 / (1.0 + pace * known.weight)
        remembered = share * fade * known.weight
        zero = jnp.zeros_like(known.residual)
        limited = undefined | (slope_share < 1.0) | jnp.any(share < 1.0)
        info = base.report(state, True, jnp.max(reach + jnp.abs(shift)), limited)
        return OnlineState(
            slopes=state.slopes + slope_step,
            intercepts=state.intercepts + intercept_step,
            statistics=ArrowheadStatistics(
                count=zero,
                weight=remembered,
                mean=known.mean,
                scatter=slope_share * scatter / (1.0 + pace * total),
                residual=zero,
                slope_residual=jnp.zeros_like(known.slope_residual),
            ),
            gap=jnp.zeros_like(state.gap),
            rounds=jnp.zeros_like(state.rounds),
            num_refits=state.num_refits + 1,
            remembered=remembered,
            innovation=jnp.where(learned, innovation, state.innovation),
            log_drift=jnp.where(learned, log_drift, state.log_drift),
        ), info

    def due(state):
        return (state.rounds >= refit_interval) | (state.num_refits < WARMUP_REFITS)

    return base.estimator(init, observe, refit, due, feature_class(features), features)


def _names(features: Any) -> tuple[str, ...]:
    """The feature names as a tuple; raises ValueError if there are none or one twice."""
    names = (features,) if isinstance(features, str) else tuple(features)
    if not names or len(set(names)) < len(names):
        raise ValueError(f"features: expected at least one name, none twice, got {names!r}")
    feature_class(names)  # refuses unknown ones
    return names


def _cold_slopes(features: tuple[str, ...], slopes: Any) -> tuple[float, ...]:
    """The initial slopes, checked, or the default."""
    if slopes is None:
        log_odds = [name.startswith("logit_") for name in features]
        return tuple(COLD_LOG_ODDS_SLOPE * each / max(sum(log_odds), 1) for each in log_odds)
    if len(slopes) != len(features):
        raise ValueError(f"cold_slopes: expected {len(features)} slopes, got {len(slopes)}")
    return tuple(static_float("cold_slopes", slope, -base.MAX_FEATURE, base.MAX_FEATURE) for slope in slopes)


def _adapted(state: OnlineState, innovation: Float[Array, " K"]) -> Float[Array, ""]:
    """The log drift after one more window.

    Innovations of a well-tuned filter are uncorrelated. Positive: it lags behind. Negative: it chases noise.
    """
    product = jnp.sum(innovation * state.innovation)
    moved = state.log_drift * (1.0 - DRIFT_RETURN) + DRIFT_GAIN * product / (1.0 + jnp.abs(product))
    return jnp.clip(moved, -DRIFT_RANGE, DRIFT_RANGE)


def _safe_ratio(numerator: Any, denominator: Any, otherwise: float = 0.0) -> jax.Array:
    """numerator / denominator, and `otherwise` where the denominator vanishes."""
    vanishes = jnp.abs(denominator) < 1e-30
    return jnp.where(vanishes, otherwise, numerator / jnp.where(vanishes, 1.0, denominator))
