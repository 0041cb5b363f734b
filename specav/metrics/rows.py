"""What all metrics share: checked rows, the loss of each row, and sums per bin of prediction."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from specav import _sums
from specav._checks import one_of, shaped, static_int

# The probability clip of log-loss, the one place that states it: probabilities lie in [2^-24, 1 - 2^-24].
# 1 - 2^-24 is the largest float32 below 1, and float32 sigmoid(17) is already 1; a loss is at most 16.6 nats.
PROBABILITY_CLIP = 2.0**-24

KINDS = ("equal_width", "equal_mass")


class Rows(NamedTuple):
    """Flat rows, padded to a power of two with weight 0 so that few shapes are ever compiled.

    Attributes:
      predictions: float32 [N]; labels: float32 [N] in [0, 1]; weights: float32 [N], >= 0.
      damaged: bool [], a row of positive weight has a NaN prediction or label.
    """

    predictions: Float[Array, " N"]
    labels: Float[Array, " N"]
    weights: Float[Array, " N"]
    damaged: Bool[Array, ""]


class BinSums(NamedTuple):
    """Sums over the rows of each bin, as pairs (high, low) of float32 [bins].

    Attributes:
      weight: sum w. prediction: sum w p. label: sum w y. gap: sum w (p - y).
      square_weight: sum w^2. square_gap: sum (w (p - y))^2.
    """

    weight: Any
    prediction: Any
    label: Any
    gap: Any
    square_weight: Any
    square_gap: Any


def checked_rows(name: str, predictions, labels, weights) -> Rows:
    """`Rows` of arrays of one shape; `name` is what the first argument is called."""
    predictions = shaped({}, name, predictions, "...", "float")
    columns = []
    for argument, value in (("labels", labels), ("weights", weights)):
        if value is None and argument == "weights":
            columns.append(None)
            continue
        kind = "bool" if jnp.result_type(value) == jnp.bool_ else "real"
        value = shaped({}, argument, value, "...", kind)
        if value.shape != predictions.shape:
            raise ValueError(f"{argument}: expected shape {list(predictions.shape)} as {name}, got {list(value.shape)}")
        columns.append(value)
    return _rows(predictions, *columns)


@jax.jit
def _rows(predictions, labels, weights):
    size = predictions.size
    weights = jnp.ones((size,), jnp.float32) if weights is None else weights

    def flat(column):
        padding = (1 << max(size - 1, 0).bit_length()) - size
        return jnp.pad(column.astype(jnp.float32).reshape(-1), (0, padding))

    predictions, labels, weights = flat(predictions), flat(labels), flat(weights)
    live = weights > 0  # false for NaN
    predictions, labels = jnp.where(live, predictions, 0.0), jnp.where(live, labels, 0.0)
    damaged = jnp.any(jnp.isnan(predictions) | jnp.isnan(labels))
    return Rows(predictions, jnp.clip(labels, 0.0, 1.0), jnp.where(live, weights, 0.0), damaged)


def row_log_loss(rows: Rows) -> Float[Array, " N"]:
    """-(y log p + (1 - y) log(1 - p)) of clipped p, nats."""
    p = jnp.clip(rows.predictions, PROBABILITY_CLIP, 1.0 - PROBABILITY_CLIP)
    return -(rows.labels * jnp.log(p) + (1.0 - rows.labels) * jnp.log1p(-p))


def row_brier(rows: Rows) -> Float[Array, " N"]:
    """y (1 - p)^2 + (1 - y) p^2: the expected squared error of an outcome of probability y."""
    p, y = rows.predictions, rows.labels
    return y * (1.0 - p) ** 2 + (1.0 - y) * p**2


def checked_bins(bins: int, kind: str) -> int:
    """`bins` as int, once it and `kind` are known to be good."""
    one_of("kind", kind, KINDS)
    return static_int("bins", bins, 1)


@functools.partial(jax.jit, static_argnames=("bins", "kind"))
def bin_sums(rows: Rows, bins: int, kind: str) -> BinSums:
    """`BinSums` over `bins` bins of the predictions, clipped to [0, 1].

    equal_width: (k / bins, (k + 1) / bins], and 0 in the first. equal_mass: bin edges are the linearly interpolated
    quantiles of the predictions, and ties stay together; the same bins as scikit-learn's `calibration_curve`.
    """
    p = jnp.clip(rows.predictions, 0.0, 1.0)
    p, y, w = jax.lax.sort((p, rows.labels, rows.weights), num_keys=1)
    if kind == "equal_width":
        ends = jnp.searchsorted(p, jnp.asarray(_inner_edges(bins)), side="right")
    else:
        # Row i of n lies below the k-th edge if i <= k (n - 1) / bins. With weights, i is the weight before the first
        # of its ties and 1 the average weight sum w^2 / sum w: the same for 0/1 weights, and free of their scale.
        high, low = _sums.cumulative(w)
        mass = high[-1] + low[-1]
        before = jnp.concatenate([jnp.zeros((1,), jnp.float32), (high + low)[:-1]])
        is_first = jnp.concatenate([jnp.ones((1,), jnp.bool_), p[1:] != p[:-1]])
        before = jax.lax.cummax(jnp.where(is_first, before, 0.0))
        spread = mass - jnp.where(mass > 0, _sums.total(w * w) / jnp.where(mass > 0, mass, 1.0), 0.0)
        ends = jnp.searchsorted(before, jnp.arange(1, bins, dtype=jnp.float32) * spread / bins, side="right")
    ends = jnp.concatenate([ends, jnp.full((1,), p.shape[0], ends.dtype)])
    gap = w * (p - y)
    high, low = _sums.segments(jnp.stack([w, w * p, w * y, gap, w * w, gap * gap]), ends)
    return damage(BinSums(*zip(high, low, strict=True)), rows)


def damage(sums, rows: Rows):
    """NaN in every sum if a row that counts holds one."""
    return jax.tree.map(lambda x: jnp.where(rows.damaged, jnp.nan, x), sums)


def _inner_edges(bins):
    """float32 [bins - 1]: p is above k / bins exactly if it is above the largest float32 not above k / bins."""
    exact = np.linspace(0.0, 1.0, bins + 1)[1:-1]
    edges = exact.astype(np.float32)
    return np.where(edges > exact, np.nextafter(edges, np.float32(0)), edges)
