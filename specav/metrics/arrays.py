"""Metrics of whole arrays of predictions and labels. All run under jit and vmap; the result is float32."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from specav import _sums
from specav._checks import one_of
from specav.metrics.rows import BinSums, bin_sums, checked_bins, checked_rows, row_brier, row_log_loss

_Any = Array | np.ndarray


class ReliabilityCurve(NamedTuple):
    """What was predicted and what happened, per bin of the prediction, float32 [bins].

    Attributes:
      mean_prediction: NaN in empty bins.
      mean_label: NaN in empty bins.
      weight: total weight of the rows in the bin; 0 in empty bins.
    """

    mean_prediction: Float[Array, " bins"]
    mean_label: Float[Array, " bins"]
    weight: Float[Array, " bins"]


def auc(
    scores: Float[_Any, "..."], labels: Shaped[_Any, "..."], *, weights: Shaped[_Any, "..."] | None = None
) -> Float[Array, ""]:
    """Area under the ROC curve: the probability that an accepted row scores above a rejected one, ties counting half.

    Exact (Mann-Whitney, by sorting), not from a grid. Any increasing function of the scores gives the same value.

    Args:
      scores: float [...], compared as float32; infinities are fine.
      labels: bool, or numbers in [0, 1] (clipped): y counts as weight y accepted and 1 - y rejected.
      weights: bool or numbers [...], default 1; not above 0 (or NaN) means the row does not exist.

    Returns:
      float32 [], within 1e-6 of the exact value; NaN if there is only one class, no row, or a NaN in a row that counts.

    Raises:
      TypeError, ValueError: wrong dtypes, or shapes that differ.

    References:
      Hanley and McNeil, The meaning and use of the area under a ROC curve, Radiology 143, 1982.
    """
    return _auc(checked_rows("scores", scores, labels, weights))


def log_loss(
    probs: Float[_Any, "..."], labels: Shaped[_Any, "..."], *, weights: Shaped[_Any, "..."] | None = None
) -> Float[Array, ""]:
    """Mean of -(y log p + (1 - y) log(1 - p)), in nats, with p clipped to [2^-24, 1 - 2^-24] (`PROBABILITY_CLIP`).

    Args:
      probs: float [...], probabilities.
      labels: bool, or numbers in [0, 1] (clipped).
      weights: bool or numbers [...], default 1; not above 0 (or NaN) means the row does not exist.

    Returns:
      float32 []; NaN without rows, or with a NaN in a row that counts.

    Raises:
      TypeError, ValueError: wrong dtypes, or shapes that differ.

    References:
      Good, Rational decisions, J. Royal Statistical Society B 14, 1952.
    """
    rows = checked_rows("probs", probs, labels, weights)
    return _mean(rows, row_log_loss(rows))


def brier(
    probs: Float[_Any, "..."], labels: Shaped[_Any, "..."], *, weights: Shaped[_Any, "..."] | None = None
) -> Float[Array, ""]:
    """Brier score, mean of (p - y)^2; for a soft label its expectation y (1 - p)^2 + (1 - y) p^2.

    With the expectation, soft and hard labels of one law have the same mean score, (p - y)^2 + y (1 - y).

    Args:
      probs: float [...], probabilities.
      labels: bool, or numbers in [0, 1] (clipped).
      weights: bool or numbers [...], default 1; not above 0 (or NaN) means the row does not exist.

    Returns:
      float32 []; NaN without rows, or with a NaN in a row that counts.

    Raises:
      TypeError, ValueError: wrong dtypes, or shapes that differ.

    References:
      Brier, Verification of forecasts expressed in terms of probability, Monthly Weather Review 78, 1950.
    """
    rows = checked_rows("probs", probs, labels, weights)
    return _mean(rows, row_brier(rows))


def expected_calibration_error(
    probs: Float[_Any, "..."],
    labels: Shaped[_Any, "..."],
    *,
    bins: int = 15,
    kind: str = "equal_width",
    norm: str = "l1",
    debiased: bool = False,
    weights: Shaped[_Any, "..."] | None = None,
) -> Float[Array, ""]:
    """Expected calibration error: how far the mean prediction of a bin is from its mean label, averaged over bins.

    With d_b = mean of p - y in bin b and s_b its share of the weight: sum s_b |d_b| (norm "l1"), or
    sqrt(sum s_b d_b^2) ("l2").

    A perfect predictor does not score 0: d_b has a standard deviation sigma_b, sigma_b^2 = sum_b (w (p - y))^2 / W_b^2
    where W_b = sum_b w. `debiased=True` subtracts what that noise is expected to add:
    * l1: sum s_b (|d_b| - sigma_b sqrt(2 / pi)), sigma sqrt(2 / pi) being the mean of |N(0, sigma^2)|. It is 0 on
      average for a calibrated predictor, and may be negative; it takes too much off where |d_b| is well above sigma_b.
    * l2: d_b^2 becomes its unbiased estimate, the mean of r_i r_j over pairs of different rows, r = p - y; the sum is
      cut at 0. A bin with one row counts 0.

    Args:
      probs: float [...], probabilities, clipped to [0, 1].
      labels: bool, or numbers in [0, 1] (clipped).
      bins: number of bins, static.
      kind: "equal_width", bins (k / bins, (k + 1) / bins]; or "equal_mass", quantiles of the predictions with ties in
        one bin.
      norm: "l1" or "l2".
      debiased: static.
      weights: bool or numbers [...], default 1; not above 0 (or NaN) means the row does not exist.

    Returns:
      float32 []; NaN without rows, or with a NaN in a row that counts.

    Raises:
      TypeError, ValueError: wrong dtypes, options, or shapes that differ.

    References:
      Naeini, Cooper, Hauskrecht, Obtaining well calibrated probabilities using Bayesian binning, AAAI 2015.
      Kumar, Liang, Ma, Verified uncertainty calibration, NeurIPS 2019 (the debiased l2 error).
      Broecker, Estimating reliability and resolution of probability forecasts, Climate Dynamics 39, 2012 (the bias).
    """
    bins = checked_bins(bins, kind)
    one_of("norm", norm, ("l1", "l2"))
    rows = checked_rows("probs", probs, labels, weights)
    return calibration_error(bin_sums(rows, bins, kind), norm, bool(debiased))


def reliability_curve(
    probs: Float[_Any, "..."],
    labels: Shaped[_Any, "..."],
    *,
    bins: int = 15,
    kind: str = "equal_width",
    weights: Shaped[_Any, "..."] | None = None,
) -> ReliabilityCurve:
    """Mean prediction and mean label per bin: the reliability diagram.

    Args:
      probs: float [...], probabilities, clipped to [0, 1].
      labels: bool, or numbers in [0, 1] (clipped).
      bins: number of bins, static.
      kind: as for `expected_calibration_error`.
      weights: bool or numbers [...], default 1; not above 0 (or NaN) means the row does not exist.

    Returns:
      `ReliabilityCurve`; all NaN with a NaN in a row that counts.

    Raises:
      TypeError, ValueError: wrong dtypes, options, or shapes that differ.

    References:
      Murphy and Winkler, Reliability of subjective probability forecasts, Applied Statistics 26, 1977.
    """
    bins = checked_bins(bins, kind)
    rows = checked_rows("probs", probs, labels, weights)
    return curve(bin_sums(rows, bins, kind))


@functools.partial(jax.jit, static_argnames=("norm", "debiased"))
def calibration_error(sums: BinSums, norm: str, debiased: bool) -> Float[Array, ""]:
    """The calibration error that the sums per bin stand for; NaN without rows."""
    weight, _, _, gap, square_weight, square_gap = (high + low for high, low in sums)
    size = jnp.where(weight > 0, weight, 1.0)
    if norm == "l1":
        error = jnp.abs(gap)
        if debiased:
            error = error - jnp.sqrt(jnp.maximum(square_gap, 0.0) * (2.0 / np.pi))
        return _ratio(*_sums.total(jnp.stack([error, weight])))
    if debiased:
        # (sum w r)^2 - sum (w r)^2 is the sum over ordered pairs of different rows, W^2 - sum w^2 its weight.
        pairs = size * size - square_weight
        several = pairs > 1e-6 * size * size
        square = jnp.where(several, (gap * gap - square_gap) / jnp.where(several, pairs, 1.0), 0.0)
    else:
        square = (gap / size) ** 2
    return jnp.sqrt(jnp.maximum(_ratio(*_sums.total(jnp.stack([weight * square, weight]))), 0.0))


@jax.jit
def curve(sums: BinSums) -> ReliabilityCurve:
    """The reliability curve that the sums per bin stand for."""
    weight, prediction, label = (high + low for high, low in sums[:3])
    return ReliabilityCurve(_ratio(prediction, weight), _ratio(label, weight), weight)


@jax.jit
def _auc(rows):
    accepted, rejected = rows.weights * rows.labels, rows.weights * (1.0 - rows.labels)
    scores, accepted, rejected = jax.lax.sort((rows.predictions, accepted, rejected), num_keys=1)
    # Rejected weight up to and including each row, then before and through the group of its ties.
    high, low = _sums.cumulative(rejected)
    through = high + low
    before = jnp.concatenate([jnp.zeros((1,), jnp.float32), through[:-1]])
    changes = scores[1:] != scores[:-1]
    edge = jnp.ones((1,), jnp.bool_)
    before = jax.lax.cummax(jnp.where(jnp.concatenate([edge, changes]), before, 0.0))
    through = jax.lax.cummin(jnp.where(jnp.concatenate([changes, edge]), through, jnp.inf), reverse=True)
    wins = accepted * (0.5 * (before + through))
    wins, accepted, rejected = _sums.total(jnp.stack([wins, accepted, rejected]))
    return _with_damage(rows, _ratio(wins, accepted * rejected))


@jax.jit
def _mean(rows, losses):
    return _with_damage(rows, _ratio(*_sums.total(jnp.stack([rows.weights * losses, rows.weights]))))


def _ratio(a, b):
    """a / b; NaN where b is 0."""
    return jnp.where(b > 0, a / jnp.where(b > 0, b, 1.0), jnp.nan)


def _with_damage(rows, value):
    return jnp.where(rows.damaged, jnp.nan, value)
