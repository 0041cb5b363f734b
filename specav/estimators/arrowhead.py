"""Streaming normal equations of a logistic regression with d shared slopes and K intercepts.

With features f, position k, weights v = p(1 - p) and residuals g = y - p, one Newton step solves

    [ A    B^T     ] [dw]   [r]      A = sum v f f^T  [d, d]     r = sum g f      [d]
    [ B    diag(C) ] [db] = [s]      B_k = sum_k v f  [K, d]     s_k = sum_k g    [K]
                                     C_k = sum_k v    [K]

an arrowhead: eliminating the intercepts leaves the d x d Schur complement A - sum_k B_k B_k^T / C_k. Computed as
written, that difference cancels in float32 (features of 14 +- .1 leave no digits). So the same numbers are kept
about their means: m_k = B_k / C_k, the scatter sum v (f - m_k)(f - m_k)^T, which *is* the Schur complement and is a
sum of squares, and sum g (f - m_k). Batches merge as in Chan, Golub and LeVeque. State O(d^2 + K d), no samples.

References:
  Chan, Golub, LeVeque, Algorithms for computing the sample variance, The American Statistician 37, 1983.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class ArrowheadStatistics(NamedTuple):
    """Sums over labels, all float32.

    Attributes:
      count: [K], labels per position.
      weight: [K], C_k = sum v.
      mean: [K, d], m_k = B_k / C_k, the weighted mean feature; 0 where there is no weight yet.
      scatter: [d, d], sum v (f - m_k)(f - m_k)^T over all positions.
      residual: [K], s_k = sum (y - p).
      slope_residual: [d], sum (y - p)(f - m_k) over all positions.
    """

    count: Float[Array, " K"]
    weight: Float[Array, " K"]
    mean: Float[Array, "K d"]
    scatter: Float[Array, "d d"]
    residual: Float[Array, " K"]
    slope_residual: Float[Array, " d"]


class NormalEquations(NamedTuple):
    """The arrowhead system in the letters of the module's docstring."""

    slopes: Float[Array, "d d"]
    coupling: Float[Array, "K d"]
    intercepts: Float[Array, " K"]
    slope_gradient: Float[Array, " d"]
    intercept_gradient: Float[Array, " K"]


def empty_statistics(num_positions: int, num_features: int) -> ArrowheadStatistics:
    """Statistics of no labels."""
    column = jnp.zeros((num_positions,), jnp.float32)
    row = jnp.zeros((num_features,), jnp.float32)
    return ArrowheadStatistics(
        count=column,
        weight=column,
        mean=jnp.zeros((num_positions, num_features), jnp.float32),
        scatter=jnp.zeros((num_features, num_features), jnp.float32),
        residual=column,
        slope_residual=row,
    )


def accumulate(
    statistics: ArrowheadStatistics,
    features: Float[Array, "B C d"],
    weights: Float[Array, "B C"],
    residuals: Float[Array, "B C"],
    depth: Int[Array, "B C"],
    observed: Bool[Array, "B C"],
    *,
    axis_name: str | None = None,
) -> ArrowheadStatistics:
    """Adds one batch of labels.

    Args:
      statistics: so far.
      features: float32, finite.
      weights: float32, v >= 0.
      residuals: float32, y - p.
      depth: int32 in [0, K), the position each column belongs to.
      observed: columns that count.
      axis_name: mapped axis over which the batch is split; sums then run over all of it, and every replica ends with
        the same bits.

    Returns:
      The statistics of both together.
    """
    num_positions, num_features = statistics.mean.shape
    f = features.reshape(-1, num_features)
    member = jax.nn.one_hot(depth.reshape(-1), num_positions, dtype=jnp.float32)
    member = member * observed.reshape(-1, 1).astype(jnp.float32)
    v, g = member * weights.reshape(-1, 1), member * residuals.reshape(-1, 1)  # [N, K]
    # Matrix products rather than scatter-adds: their order, hence their bits, is the same on every run.
    count, weight, residual, moment = _total(
        (jnp.sum(member, axis=0), jnp.sum(v, axis=0), jnp.sum(g, axis=0), _dot(v.T, f)), axis_name
    )
    known = weight > 1e-30
    mean = jnp.where(known[:, None], moment / jnp.where(known, weight, 1.0)[:, None], statistics.mean)
    # One correction of the mean, and everything else about it, so that nothing cancels.
    offset = f - _dot(member, mean)
    total_v = jnp.sum(v, axis=1, keepdims=True)
    total_g = jnp.sum(g, axis=1)
    scatter, slope_residual = _total((_dot(offset.T, total_v * offset), _dot(total_g, offset)), axis_name)

    new_weight = statistics.weight + weight
    share = jnp.where(known, weight / jnp.where(known, new_weight, 1.0), 0.0)
    gap = mean - statistics.mean
    new_mean = statistics.mean + share[:, None] * gap
    between = _dot(gap.T, (share * statistics.weight)[:, None] * gap)
    # Residuals were summed about the old means; move them to the new ones.
    moved = _dot(statistics.residual, new_mean - statistics.mean) + _dot(residual, new_mean - mean)
    return ArrowheadStatistics(
        count=statistics.count + count,
        weight=new_weight,
        mean=new_mean,
        scatter=statistics.scatter + scatter + between,
        residual=statistics.residual + residual,
        slope_residual=statistics.slope_residual + slope_residual - moved,
    )


def normal_equations(statistics: ArrowheadStatistics) -> NormalEquations:
    """The uncentred system that the statistics stand for; to read and to test, the solvers do not need it."""
    coupling = statistics.weight[:, None] * statistics.mean
    return NormalEquations(
        slopes=statistics.scatter + _dot(statistics.mean.T, coupling),
        coupling=coupling,
        intercepts=statistics.weight,
        slope_gradient=statistics.slope_residual + _dot(statistics.residual, statistics.mean),
        intercept_gradient=statistics.residual,
    )


def schur_complement(statistics: ArrowheadStatistics, ridge: float) -> tuple[Float[Array, "d d"], Float[Array, " d"]]:
    """Eliminates the intercepts from the system with `ridge` > 0 added to its whole diagonal.

    A + ridge - sum B B^T / (C + ridge) and r - sum B s / (C + ridge), written so that they do not cancel.

    Returns:
      (matrix, vector) with matrix @ slope_step = vector.
    """
    left = ridge / (statistics.weight + ridge)
    eye = ridge * jnp.eye(statistics.mean.shape[1], dtype=jnp.float32)
    kept = _dot(statistics.mean.T, (left * statistics.weight)[:, None] * statistics.mean)
    vector = statistics.slope_residual + _dot(left * statistics.residual, statistics.mean)
    return statistics.scatter + eye + kept, vector


def intercept_steps(
    statistics: ArrowheadStatistics, slope_step: Float[Array, " d"], ridge: float
) -> Float[Array, " K"]:
    """Back-substitution: (s_k - B_k . slope_step) / (C_k + ridge)."""
    pull = statistics.weight * _dot(statistics.mean, slope_step)
    return (statistics.residual - pull) / (statistics.weight + ridge)


def solve_positive(matrix: Float[Array, "d d"], vector: Float[Array, " d"]) -> Float[Array, " d"]:
    """Solves a positive definite system by Cholesky after scaling its diagonal to one.

    Collinear features make it singular: a relative 1e-5 on the diagonal keeps float32 out of trouble and changes a
    well-posed solution by as little.
    """
    scale = jax.lax.rsqrt(jnp.diagonal(matrix))
    scaled = matrix * scale[:, None] * scale[None, :] + 1e-5 * jnp.eye(vector.shape[0], dtype=jnp.float32)
    return scale * jax.scipy.linalg.cho_solve((jnp.linalg.cholesky(scaled), True), scale * vector)


def _total(tree, axis_name):
    """Sums over the mapped axis, if there is one."""
    return tree if axis_name is None else jax.lax.psum(tree, axis_name)


def _dot(a, b):
    """Matrix product in full float32 (accelerators round to less by default)."""
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
