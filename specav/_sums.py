"""Sums in twice float32's precision: an unevaluated pair (high, low) stands for high + low.

Plain float32 sums drift: 1e7 equal rows lose two digits and more. Pairs keep about 45 bits at a few additions a term.

References:
  Knuth, The Art of Computer Programming 2, 4.2.2 (two-sum). Neumaier, Rundungsfehleranalyse einiger Verfahren zur
  Summation endlicher Summen, ZAMM 54, 1974 (compensated sums).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Pair = tuple[Float[Array, "..."], Float[Array, "..."]]


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
    """Sum over the last axis, in float32 at the end only. By halving, so that equal terms add exactly."""
    low = jnp.zeros_like(high) if low is None else low
    width = high.shape[-1]
    padding = [(0, 0)] * (high.ndim - 1) + [(0, (1 << max(width - 1, 0).bit_length()) - width)]
    high, low = jnp.pad(high, padding), jnp.pad(low, padding)
    while high.shape[-1] > 1:
        half = high.shape[-1] // 2
        high, low = add((high[..., :half], low[..., :half] + low[..., half:]), high[..., half:])
    return (high + low)[..., 0]


def cumulative(values: Float[Array, " N"]) -> Pair:
    """Inclusive prefix sums, as pairs."""
    return jax.lax.associative_scan(merge, (values, jnp.zeros_like(values)))


def segments(values: Float[Array, " N"], ends) -> Pair:
    """Sums over the consecutive segments values[ends[i-1]:ends[i]]; ends int [M], non-decreasing, in 0..N."""
    zero = jnp.zeros((1,), values.dtype)
    high, low = (jnp.concatenate([zero, part])[ends] for part in cumulative(values))
    before_high, before_low = (jnp.concatenate([zero, part[:-1]]) for part in (high, low))
    return merge((high, low), (-before_high, -before_low))
