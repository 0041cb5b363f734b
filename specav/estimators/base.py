"""What every acceptance estimator is: five pure functions over a pytree state, and the checks they share."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specav._checks import shaped
from specav.estimators.arrowhead import ArrowheadStatistics, empty_statistics
from specav.labels import Labels
from specav.metrics import PROBABILITY_CLIP

# Predictions lie in [MIN_PROBABILITY, 1 - MIN_PROBABILITY], the range that log-loss clips to.
MIN_PROBABILITY = PROBABILITY_CLIP
# Features are clamped to +-MAX_FEATURE, the range of the log-odds features.
MAX_FEATURE = 40.0


class AcceptanceEstimator(NamedTuple):
    """Predicts which drafts the target will accept, and learns from what it did.

    B requests, C draft columns, K positions with an intercept each, d features. All functions are pure and run under
    jit, vmap and scan. They raise TypeError or ValueError on wrong shapes and dtypes while tracing.

    A row (one draft) with a NaN among its features, probability or label teaches nothing; with a NaN among its
    features it is predicted from its intercept alone. Features are clamped to +-40.

    Attributes:
      init: () -> state.
      predict: (state, features, depth=None) -> float32 [B, C], probabilities in [2^-24, 1 - 2^-24].
        features: float [B, C] for one feature, else [B, C, d] in the order of `features`
        (`specav.features.stack_features`). depth: int [B, C], the position (0-based, clamped to [0, K)) of each
        column; default its column index, and then C must be K. Kept drafts sit in earlier columns than their depth.
      observe: (state, features, probs, labels, depth=None) -> state. Accumulates one round. probs: float [B, C], the
        predictions made when the drafts were drawn. labels: `Labels` [B, C], hard or soft.
      refit: (state) -> (state, RefitInfo). Moves the coefficients.
      step: (state, features, probs, labels, depth=None) -> (state, RefitInfo). Observes, and refits when it is time.
      depends_on: "prefix" or "draw", what the predictions read (`specav.features.feature_class`).
      features: names of the features, in order.
    """

    init: Callable[[], Any]
    predict: Callable[..., Float[Array, "B C"]]
    observe: Callable[..., Any]
    refit: Callable[[Any], tuple[Any, "RefitInfo"]]
    step: Callable[..., tuple[Any, "RefitInfo"]]
    depends_on: str
    features: tuple[str, ...]


class RefitInfo(NamedTuple):
    """What a step or a refit did.

    Attributes:
      refitted: bool [], whether the coefficients were refitted.
      num_observed: float32 [], labels since the last refit.
      step_norm: float32 [], the largest change of a logit within features of +-40, 0 without a refit.
      limited: bool [], whether a safeguard shortened or dropped a step.
      calibration_gap: float32 [], mean prediction minus mean label since the last refit; 0 without labels.
    """

    refitted: Bool[Array, ""]
    num_observed: Float[Array, ""]
    step_norm: Float[Array, ""]
    limited: Bool[Array, ""]
    calibration_gap: Float[Array, ""]


class LogisticState(NamedTuple):
    """State of sigmoid(slopes . features + intercepts[depth]).

    Attributes:
      slopes: float32 [d].
      intercepts: float32 [K].
      statistics: the normal equations.
      gap: float32 [], sum of (prediction - label) since the last refit.
      rounds: int32 [], rounds since the last refit.
      num_refits: int32 [].
    """

    slopes: Float[Array, " d"]
    intercepts: Float[Array, " K"]
    statistics: ArrowheadStatistics
    gap: Float[Array, ""]
    rounds: Int[Array, ""]
    num_refits: Int[Array, ""]


class Batch(NamedTuple):
    """One round's checked and cleaned arguments: float32 [B, C, d], [B, C] ..., NaN rows not observed."""

    features: Float[Array, "B C d"]
    depth: Int[Array, "B C"]
    probs: Float[Array, "B C"]
    accepted: Float[Array, "B C"]
    observed: Bool[Array, "B C"]


def initial_state(num_positions: int, slopes: tuple[float, ...], intercept: float) -> LogisticState:
    """A `LogisticState` before any label."""
    return LogisticState(
        slopes=jnp.array(slopes, jnp.float32),
        intercepts=jnp.full((num_positions,), intercept, jnp.float32),
        statistics=empty_statistics(num_positions, len(slopes)),
        gap=jnp.zeros((), jnp.float32),
        rounds=jnp.zeros((), jnp.int32),
        num_refits=jnp.zeros((), jnp.int32),
    )


def logits_of(state: Any, features: Float[Array, "B C d"], depth: Int[Array, "B C"]) -> Float[Array, "B C"]:
    """slopes . features + intercepts[depth], of cleaned features."""
    linear = jnp.sum(features * jnp.broadcast_to(state.slopes, features.shape), axis=-1)
    return linear + state.intercepts[depth]


def both_probabilities(logits: Float[Array, "B C"]) -> tuple[Float[Array, "B C"], Float[Array, "B C"]]:
    """(p, 1 - p), each exact to float32, with p in [2^-24, 1 - 2^-24]."""
    up, down = jax.nn.sigmoid(logits), jax.nn.sigmoid(-logits)
    low, high = MIN_PROBABILITY, 1.0 - MIN_PROBABILITY
    return jnp.clip(up, low, high), jnp.clip(down, low, high)


def predict_logistic(state: Any, features: Any, depth: Any = None) -> Float[Array, "B C"]:
    """The `predict` of every estimator whose state is a `LogisticState`."""
    num_positions, num_features = state.statistics.mean.shape
    features, depth, _ = check_features(features, depth, num_positions, num_features)
    probs = jax.nn.sigmoid(logits_of(state, features, depth))
    return jnp.clip(probs, MIN_PROBABILITY, 1.0 - MIN_PROBABILITY)


def check_features(features: Any, depth: Any, num_positions: int, num_features: int):
    """Checks and cleans features and depth.

    Returns:
      (float32 [B, C, d] clamped to +-40 and 0 on rows with a NaN, int32 [B, C] depth, bool [B, C] rows without NaN).
    """
    columns = str(num_positions) if depth is None else "C"
    dims: dict = {}
    features = shaped(
        dims, "features", features, f"B {columns}" + (f" {num_features}" if num_features > 1 else ""), "float"
    )
    features = features.astype(jnp.float32)
    if num_features == 1:
        features = features[..., None]
    shape = features.shape[:2]
    if depth is None:
        depth = jnp.broadcast_to(jnp.arange(num_positions, dtype=jnp.int32), shape)
    else:
        depth = jnp.clip(shaped(dims, "depth", depth, "B C", "int").astype(jnp.int32), 0, num_positions - 1)
    usable = ~jnp.any(jnp.isnan(features), axis=-1)
    features = jnp.where(usable[..., None], jnp.clip(features, -MAX_FEATURE, MAX_FEATURE), 0.0)
    return features, depth, usable


def check_batch(features: Any, probs: Any, labels: Any, depth: Any, num_positions: int, num_features: int) -> Batch:
    """Checks and cleans the arguments of `observe`; see `AcceptanceEstimator`."""
    features, depth, usable = check_features(features, depth, num_positions, num_features)
    dims: dict = dict(zip("BC", depth.shape, strict=True))
    probs = shaped(dims, "probs", probs, "B C", "float").astype(jnp.float32)
    if not (isinstance(labels, tuple) and len(labels) == 2):
        raise TypeError(f"labels: expected Labels(accepted, observed), got {type(labels).__name__}")
    accepted, observed = labels
    soft = jnp.issubdtype(jnp.asarray(accepted).dtype, jnp.floating)
    accepted = shaped(dims, "labels.accepted", accepted, "B C", "float" if soft else "bool").astype(jnp.float32)
    observed = shaped(dims, "labels.observed", observed, "B C", "bool")
    observed = observed & usable & ~jnp.isnan(probs) & ~jnp.isnan(accepted)
    return Batch(
        features=features,
        depth=depth,
        probs=jnp.where(observed, jnp.clip(probs, 0.0, 1.0), 0.5),
        accepted=jnp.where(observed, jnp.clip(accepted, 0.0, 1.0), 0.5),
        observed=observed,
    )


def observation_gap(batch: Batch, axis_name: str | None) -> Float[Array, ""]:
    """Sum of (prediction - label) over the observed rows of a batch, and over the mapped axis if there is one."""
    gap = jnp.sum(jnp.where(batch.observed, batch.probs - batch.accepted, 0.0))
    return gap if axis_name is None else jax.lax.psum(gap, axis_name)


def report(state: Any, refitted: bool, step_norm: Any = 0.0, limited: Any = False) -> RefitInfo:
    """The `RefitInfo` of the window that `state` holds."""
    num_observed = jnp.sum(state.statistics.count)
    return RefitInfo(
        refitted=jnp.asarray(refitted),
        num_observed=num_observed,
        step_norm=jnp.asarray(step_norm, jnp.float32),
        limited=jnp.asarray(limited),
        calibration_gap=state.gap / jnp.maximum(num_observed, 1.0),
    )


def estimator(
    init: Callable[[], Any],
    observe: Callable[..., Any],
    refit: Callable[[Any], tuple[Any, RefitInfo]],
    due: Callable[[Any], Bool[Array, ""]],
    depends_on: str,
    features: tuple[str, ...],
) -> AcceptanceEstimator:
    """Assembles an `AcceptanceEstimator`: its `step` observes first and refits if `due(state)` then says so."""

    def step(state: Any, features: Any, probs: Any, labels: Labels, depth: Any = None):
        state = observe(state, features, probs, labels, depth)
        # Computed every round and selected: a branch would cost more, as accelerators fetch its predicate to the host.
        now = due(state)
        return jax.tree.map(lambda new, old: jnp.where(now, new, old), refit(state), (state, report(state, False)))

    return AcceptanceEstimator(init, predict_logistic, observe, refit, step, depends_on, features)
