"""Metrics of streams: small states that are updated batch by batch and merged across shards.

Every sum is a pair of float32 (`specav._sums`), so 1e7 rows are as accurate as ten. Merging is associative up to a
rounding of about 1e-14, and shards merged equal one pass to the same.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from specav import _sums
from specav._checks import one_of, static_float, static_int
from specav.metrics.arrays import calibration_error, curve
from specav.metrics.rows import BinSums, bin_sums, checked_bins, checked_rows, damage, row_brier, row_log_loss


class StreamingMetric(NamedTuple):
    """Pure functions over a pytree state of fixed shape; they run under jit, vmap and scan.

    Attributes:
      init: () -> state, of no rows.
      update: (state, predictions, labels, weights=None) -> state. Arrays [...] as for the metric of whole arrays:
        rows of weight 0 do not matter. A NaN in a row that counts makes the result NaN from then on.
      merge: (state, state) -> state of both streams.
      compute: (state) -> the metric; NaN without rows.
    """

    init: Callable[[], Any]
    update: Callable[..., Any]
    merge: Callable[[Any, Any], Any]
    compute: Callable[[Any], Any]


class AUCBounds(NamedTuple):
    """AUC from a grid, float32 [] each.

    Attributes:
      auc: with rows in one cell counted as ties.
      error: the exact AUC lies in [auc - error, auc + error]; half the share of (accepted, rejected) pairs that fall
        into one cell.
    """

    auc: Float[Array, ""]
    error: Float[Array, ""]


def streaming_auc(
    bins: int = 2048, *, inputs: str = "probabilities", max_logit: float | None = None
) -> StreamingMetric:
    """AUC of a stream, on a fixed grid of logits.

    The grid has `bins` equal cells over +-max_logit; logits beyond go to the outermost cells. Rows in one cell count as
    ties. Only pairs within a cell can be wrong, each by at most 1/2, which gives the bound that `compute` returns
    beside the value: 1/2 sum_c A_c R_c / (A R), with A_c and R_c the accepted and rejected weight in cell c. Exact ties
    are in it too, so the bound is not 0 for discrete scores although their ties are counted right.

    Args:
      bins: number of cells, static.
      inputs: what `update` is given: "probabilities" in [0, 1], or "logits" (log-odds features, say), any real numbers.
      max_logit: default 17 for probabilities (float32 has none between sigmoid(17) and 1), 40 for logits.

    Returns:
      `StreamingMetric`; `compute` returns `AUCBounds`, NaN if there is only one class.

    Raises:
      TypeError, ValueError: bad options; `update` raises as `specav.metrics.auc`.
    """
    bins = static_int("bins", bins, 1)
    one_of("inputs", inputs, ("probabilities", "logits"))
    default = 17.0 if inputs == "probabilities" else 40.0
    limit = static_float("max_logit", default if max_logit is None else max_logit, 1e-6)
    edges = np.linspace(-limit, limit, bins + 1)[1:-1]
    edges = (1.0 / (1.0 + np.exp(-edges)) if inputs == "probabilities" else edges).astype(np.float32)

    def init():
        return _pair_of_zeros((bins,)), _pair_of_zeros((bins,))

    def update(state, rows):
        accepted, rejected = rows.weights * rows.labels, rows.weights * (1.0 - rows.labels)
        scores, accepted, rejected = jax.lax.sort((rows.predictions, accepted, rejected), num_keys=1)
        # Cells by comparison with their edges, never by a rounded logit: their order is that of the scores.
        ends = jnp.searchsorted(scores, jnp.asarray(edges), side="right")
        ends = jnp.concatenate([ends, jnp.full((1,), scores.shape[0], ends.dtype)])
        return merge(state, damage(_segments((accepted, rejected), ends), rows))

    def merge(a, b):
        return tuple(_sums.merge(x, y) for x, y in zip(a, b, strict=True))

    def compute(state):
        accepted, rejected = (high + low for high, low in state)
        high, low = _sums.cumulative(rejected)
        below = (high + low) - 0.5 * rejected
        sums = _sums.total(jnp.stack([accepted, rejected, accepted * below, accepted * rejected]))
        pairs, known = sums[0] * sums[1], sums[0] * sums[1] > 0
        value, error = sums[2] / jnp.where(known, pairs, 1.0), 0.5 * sums[3] / jnp.where(known, pairs, 1.0)
        return AUCBounds(jnp.where(known, value, jnp.nan), jnp.where(known, error, jnp.nan))

    return _compiled(inputs, init, update, merge, compute)


def streaming_log_loss() -> StreamingMetric:
    """Log-loss of a stream: as `specav.metrics.log_loss`. `compute` returns float32 []."""
    return _streaming_mean(row_log_loss)


def streaming_brier() -> StreamingMetric:
    """Brier score of a stream: as `specav.metrics.brier`. `compute` returns float32 []."""
    return _streaming_mean(row_brier)


def streaming_expected_calibration_error(
    bins: int = 15, *, norm: str = "l1", debiased: bool = False
) -> StreamingMetric:
    """Expected calibration error of a stream, in bins of equal width: as `specav.metrics.expected_calibration_error`.

    Args:
      bins: number of bins, static.
      norm: "l1" or "l2".
      debiased: static.

    Returns:
      `StreamingMetric`; `compute` returns float32 [].

    Raises:
      TypeError, ValueError: bad options.
    """
    one_of("norm", norm, ("l1", "l2"))
    return _streaming_bins(bins, lambda sums: calibration_error(sums, norm, debiased))


def streaming_reliability_curve(bins: int = 15) -> StreamingMetric:
    """Reliability curve of a stream, in bins of equal width. `compute` returns `specav.metrics.ReliabilityCurve`.

    Its state is that of `streaming_expected_calibration_error` with as many bins.
    """
    return _streaming_bins(bins, curve)


def _streaming_mean(row_loss):
    """Weighted mean of a loss per row; the state is (sum of w * loss, sum of w)."""

    def init():
        return _pair_of_zeros((1,)), _pair_of_zeros((1,))

    def update(state, rows):
        ends = jnp.full((1,), rows.weights.shape[0], jnp.int32)
        return merge(state, damage(_segments((rows.weights * row_loss(rows), rows.weights), ends), rows))

    def merge(a, b):
        return tuple(_sums.merge(x, y) for x, y in zip(a, b, strict=True))

    def compute(state):
        loss, weight = ((high + low)[0] for high, low in state)
        return jnp.where(weight > 0, loss / jnp.where(weight > 0, weight, 1.0), jnp.nan)

    return _compiled("probs", init, update, merge, compute)


def _streaming_bins(bins, read):
    """Sums per bin of equal width, and what `read` makes of them."""
    bins = checked_bins(bins, "equal_width")

    def init():
        return BinSums(*(_pair_of_zeros((bins,)) for _ in BinSums._fields))

    def update(state, rows):
        return merge(state, bin_sums(rows, bins, "equal_width"))

    def merge(a, b):
        return BinSums(*(_sums.merge(x, y) for x, y in zip(a, b, strict=True)))

    return _compiled("probs", init, update, merge, read)


def _compiled(name, init, update, merge, compute):
    """The metric; every function compiled once per (padded) shape also where the caller compiles nothing."""
    add, merge, compute = jax.jit(update), jax.jit(merge), jax.jit(compute)

    def checked_update(state, predictions, labels, weights=None):
        return add(state, checked_rows(name, predictions, labels, weights))

    return StreamingMetric(init, checked_update, merge, compute)


def _segments(columns, ends):
    """A pair of sums per column."""
    return tuple(zip(*_sums.segments(jnp.stack(columns), ends), strict=True))


def _pair_of_zeros(shape):
    return jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32)
