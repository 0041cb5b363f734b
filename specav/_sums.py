"""Sums in twice float32's precision: an unevaluated pair (high, low) stands for high + low.

Plain float32 sums drift: 1e7 equal rows lose two digits and more. Pairs keep about 45 bits at a few additions a term.

References:
  Knuth, The Art of Computer Programming 2, 4.2.2 (two-sum). Neumaier, Rundungsfehleranalyse einiger Verfahren zur
  Summation endlicher Summen, ZAMM 54, 1974 (compensated sums).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Pair = tuple[Float[Array, "..."], Float[Array, "..."]]
_LANES = 512


def two_sum(a, b) -> Pair:
    """(s, e) with s = a + b rounded and s + e = a + b exactly."""
    s = a + b
    moved = s - a
    return s, (a - (s - moved)) + (b - moved)


def add(pair: Pair, term) -> Pair:
    """Pair plus one float32 term. `low` is not normalised: cheap, for inner loops."""
    high, error = two_sum(pair[0], term)
    return high, pair[1] + error


def merge(a: Pair, b: Pair) -> Pair:
    """Sum of two pairs, normalised; associative up to its rounding (about 1e-14)."""
    high, error = two_sum(a[0], b[0])
    return two_sum(high, (a[1] + b[1]) + error)


def total(high: Float[Array, "*b N"], low: Float[Array, "*b N"] | None = None) -> Float[Array, "*b"]:
    """Sum over the last axis, in float32 at the end only. The last steps halve, so that equal terms add exactly."""
    low = jnp.zeros_like(high) if low is None else low
    if high.shape[-1] > _LANES:  # first down to _LANES partial sums
        blocks = [jnp.moveaxis(_padded(x, _LANES).reshape(*x.shape[:-1], -1, _LANES), -2, 0) for x in (high, low)]
        zeros = jnp.zeros(blocks[0].shape[1:], jnp.float32)
        (high, low), _ = jax.lax.scan(lambda s, x: (merge(s, (x[0], x[1])), None), (zeros, zeros), tuple(blocks))
    width = 1 << max(high.shape[-1] - 1, 0).bit_length()
    high, low = _padded(high, width), _padded(low, width)
    while high.shape[-1] > 1:
        half = high.shape[-1] // 2
        high, low = add((high[..., :half], low[..., :half] + low[..., half:]), high[..., half:])
    return (high + low)[..., 0]


def cumulative(values: Float[Array, "*b N"]) -> Pair:
    """Inclusive prefix sums along the last axis, as pairs.

    Within about sqrt(N) rows of as many values, then over the rows: two short loops of vectors, which compile at once
    where an associative scan has log N levels.
    """
    size = values.shape[-1]
    width = 1 << max(size - 1, 0).bit_length() // 2
    grid = _padded(values, width).reshape(*values.shape[:-1], -1, width)
    high, low = _running(grid)
    row_high, row_low = _running(high[..., -1], low[..., -1])
    before = (_zero_first(row_high[..., :-1])[..., None], _zero_first(row_low[..., :-1])[..., None])
    high, low = merge((high, low), before)
    return high.reshape(*values.shape[:-1], -1)[..., :size], low.reshape(*values.shape[:-1], -1)[..., :size]


def segments(values: Float[Array, "*b N"], ends: Int[Array, " M"]) -> Pair:
    """Sums over the consecutive segments values[..., ends[i-1]:ends[i]]; `ends` non-decreasing, in 0..N."""
    high, low = (_zero_first(part)[..., ends] for part in cumulative(values))
    return merge((high, low), (-_zero_first(high[..., :-1]), -_zero_first(low[..., :-1])))


def _running(high, low=None) -> Pair:
    """Inclusive prefix sums along the last axis, one step a value."""
    columns = (jnp.moveaxis(high, -1, 0), jnp.moveaxis(jnp.zeros_like(high) if low is None else low, -1, 0))
    zeros = jnp.zeros(high.shape[:-1], jnp.float32)

    def step(sums, pair):
        sums = merge(sums, pair)
        return sums, sums

    high, low = jax.lax.scan(step, (zeros, zeros), columns)[1]
    return jnp.moveaxis(high, 0, -1), jnp.moveaxis(low, 0, -1)


def _padded(x, multiple):
    """Zeros after the last axis, up to a multiple."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % multiple)])


def _zero_first(x):
    """A zero before the last axis."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(1, 0)])
