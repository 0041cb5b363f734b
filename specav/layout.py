"""To and from the flattened layout of serving engines.

Engines keep the rows of a batch end to end, without gaps: draft logits as [num_tokens, V] with `num_draft_tokens [B]`,
target logits with n + 1 rows per request. Here a batch is [B, K, ...], padded at the end. The flattened side gets a
static size too, so that everything compiles once: rows beyond the last real one are padding, which belongs to a segment
of its own, number B, never to a request.

Draft-shaped arrays (tokens, logits, features) go through `flatten_drafts` and `unflatten_drafts`, target-shaped ones
(the tokens fed, target logits) through `flatten_target_rows` and `unflatten_target_rows`. `flat_layout` alone says
which row is whose.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from specav._checks import shaped, static_int
from specav.survival import valid_slots


class FlatLayout(NamedTuple):
    """Which request and position each row of a flattened array belongs to.

    Attributes:
      requests: int32 [N], the row's request; B for padding. Ids for `jax.ops.segment_sum` with B + 1 segments.
      positions: int32 [N], the row's index within its request (within the padding).
      starts: int32 [B+1], the first row of every request; the last entry is the number of real rows.
      overflow: bool [], whether N is too small, so that rows at the end are lost. A lost draft is a draft withdrawn
        after it was drawn, which bends the output law: choose N = B * K if in doubt.
    """

    requests: Int[Array, " N"]
    positions: Int[Array, " N"]
    starts: Int[Array, " B1"]
    overflow: Bool[Array, ""]


def flat_layout(num_rows: Int[Array, " B"], num_tokens: int) -> FlatLayout:
    """The flattened layout of `num_rows[b]` rows per request, in order, padded to `num_tokens` rows.

    Args:
      num_rows: int [B], clamped to >= 0: num_drafts, or num_verified + 1.
      num_tokens: N, static, at least 1.

    Returns:
      A `FlatLayout`.

    Raises:
      TypeError, ValueError: wrong dtype or shape, or N < 1.

    References:
      The ragged batches of vLLM's and SGLang's speculative decoding: counts per request and cumulative starts.
    """
    num_rows = jnp.maximum(shaped({}, "num_rows", num_rows, "B", "int").astype(jnp.int32), 0)
    size = static_int("num_tokens", num_tokens, 1)
    starts = jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(num_rows, dtype=jnp.int32)])
    rows = jnp.arange(size, dtype=jnp.int32)
    # The number of requests that end at or before the row; empty ones are stepped over.
    requests = jnp.searchsorted(starts[1:], rows, side="right", method="scan_unrolled").astype(jnp.int32)
    return FlatLayout(requests, rows - starts[requests], starts, starts[-1] > size)


def flatten_drafts(
    values: Shaped[Array, "B K ..."], num_drafts: Int[Array, " B"], *, num_tokens: int | None = None, fill: Any = 0
) -> tuple[Shaped[Array, "N ..."], FlatLayout]:
    """Flattens anything that has one entry per draft.

    Args:
      values: [B, K, ...], any dtype: tokens, logits, features.
      num_drafts: int [B], clamped to [0, K].
      num_tokens: N, static; default B * K, which always has room.
      fill: value of padding rows: -1 for tokens.

    Returns:
      ([N, ...] of the same dtype, `FlatLayout`).

    Raises:
      TypeError, ValueError: wrong dtypes or shapes.
    """
    return _flatten("values", values, num_drafts, num_tokens, fill)


def unflatten_drafts(
    rows: Shaped[Array, "N ..."], num_drafts: Int[Array, " B"], num_positions: int, *, fill: Any = 0
) -> Shaped[Array, "B K ..."]:
    """The reverse of `flatten_drafts`: from [num_tokens, ...] and counts to a padded batch.

    Args:
      rows: [N, ...], request after request; what comes after the last real row is ignored.
      num_drafts: int [B], the engine's num_draft_tokens, clamped to [0, K].
      num_positions: K, static. Counts above K cannot be represented: the caller must rule them out.
      fill: value of empty slots, and of slots whose row lies beyond N. Use -1 for tokens.

    Returns:
      [B, K, ...] of the same dtype.

    Raises:
      TypeError, ValueError: wrong dtypes or shapes.
    """
    return _unflatten("rows", rows, num_drafts, static_int("num_positions", num_positions, 1), fill)


def flatten_target_rows(
    values: Shaped[Array, "B K1 ..."],
    num_verified: Int[Array, " B"],
    *,
    active: Bool[Array, " B"] | None = None,
    num_tokens: int | None = None,
    fill: Any = 0,
) -> tuple[Shaped[Array, "N ..."], FlatLayout]:
    """Flattens what has n + 1 rows per request: the tokens fed to the target, or its logits.

    Args:
      values: [B, K+1, ...], any dtype. Row 0 is the last committed token, row i draft i.
      num_verified: int [B], n, clamped to [0, K].
      active: bool [B], requests that take part; the others have no row. Default: all.
      num_tokens: N, static; default B * (K + 1).
      fill: value of padding rows.

    Returns:
      ([N, ...] of the same dtype, `FlatLayout`).

    Raises:
      TypeError, ValueError: wrong dtypes or shapes.
    """
    return _flatten("values", values, _target_counts(num_verified, active), num_tokens, fill)


def unflatten_target_rows(
    rows: Shaped[Array, "N ..."],
    num_verified: Int[Array, " B"],
    num_positions: int,
    *,
    active: Bool[Array, " B"] | None = None,
    fill: Any = 0,
) -> Shaped[Array, "B K1 ..."]:
    """The reverse of `flatten_target_rows`, e.g. from an engine's target logits to what `speculative_verify` takes.

    Args:
      rows: [N, ...], n + 1 rows per active request.
      num_verified: int [B], n, clamped to [0, K].
      num_positions: K, static; the result has K + 1 columns.
      active: as in `flatten_target_rows`.
      fill: value of rows that were not computed.

    Returns:
      [B, K+1, ...] of the same dtype.

    Raises:
      TypeError, ValueError: wrong dtypes or shapes.
    """
    width = static_int("num_positions", num_positions, 1) + 1
    return _unflatten("rows", rows, _target_counts(num_verified, active), width, fill)


def with_bonus_rows(
    verified: Shaped[Array, "B K ..."], bonus: Shaped[Array, "B ..."], num_verified: Int[Array, " B"]
) -> Shaped[Array, "B K1 ..."]:
    """Joins target rows that an engine keeps apart: n rows of tested drafts, and one bonus row per request.

    Args:
      verified: [B, K, ...], rows 0..n-1 are real.
      bonus: [B, ...], the row after the last verified draft, same dtype.
      num_verified: int [B], n, clamped to [0, K].

    Returns:
      [B, K+1, ...] with the bonus row at column n; columns beyond hold whatever `verified` had, zeros in the last.

    Raises:
      TypeError, ValueError: wrong dtypes or shapes.
    """
    dims: dict[str, Any] = {}
    num_verified = shaped(dims, "num_verified", num_verified, "B", "int").astype(jnp.int32)
    verified = _batched("verified", verified, num_verified)
    bonus = jnp.asarray(bonus)
    expected = (verified.shape[0], *verified.shape[2:])
    if bonus.shape != expected or bonus.dtype != verified.dtype:
        raise ValueError(f"bonus: expected {verified.dtype} {list(expected)}, got {bonus.dtype} {list(bonus.shape)}")
    width = verified.shape[1]
    padded = jnp.concatenate([verified, jnp.zeros_like(verified[:, :1])], axis=1)
    columns = jnp.broadcast_to(jnp.arange(width + 1, dtype=jnp.int32), padded.shape[:2])
    at_bonus = columns == jnp.clip(num_verified, 0, width)[:, None]
    return jnp.where(_expand(at_bonus, padded), jnp.broadcast_to(bonus[:, None], padded.shape), padded)


def _target_counts(num_verified, active):
    """n + 1 rows per active request."""
    dims: dict[str, Any] = {}
    num_verified = shaped(dims, "num_verified", num_verified, "B", "int").astype(jnp.int32)
    counts = jnp.maximum(num_verified, 0) + 1
    if active is None:
        return counts
    return jnp.where(shaped(dims, "active", active, "B", "bool"), counts, 0)


def _flatten(name, values, counts, num_tokens, fill):
    counts = shaped({}, "num_drafts", counts, "B", "int").astype(jnp.int32)
    values = _batched(name, values, counts)
    batch, width = values.shape[:2]
    layout = flat_layout(jnp.clip(counts, 0, width), batch * width if num_tokens is None else num_tokens)
    real = layout.requests < batch
    rows = values[jnp.where(real, layout.requests, 0), jnp.where(real, layout.positions, 0)]
    return jnp.where(_expand(real, rows), rows, jnp.asarray(fill, rows.dtype)), layout


def _unflatten(name, rows, counts, width, fill):
    rows = jnp.asarray(rows)
    if rows.ndim < 1 or rows.shape[0] < 1:
        raise ValueError(f"{name}: expected shape [N, ...] with N >= 1, got {list(rows.shape)}")
    counts = jnp.clip(shaped({}, "num_drafts", counts, "B", "int").astype(jnp.int32), 0, width)
    starts = jnp.cumsum(counts, dtype=jnp.int32) - counts
    index = starts[:, None] + jnp.arange(width, dtype=jnp.int32)[None, :]
    real = valid_slots(counts, width) & (index < rows.shape[0])
    values = rows[jnp.where(real, index, 0)]
    return jnp.where(_expand(real, values), values, jnp.asarray(fill, rows.dtype))


def _batched(name, values, counts):
    """An array of any dtype with at least two axes, the first as long as the counts."""
    values = jnp.asarray(values)
    if values.ndim < 2 or values.shape[0] != counts.shape[0]:
        raise ValueError(f"{name}: expected shape [B={counts.shape[0]}, K, ...], got {list(values.shape)}")
    return values


def _expand(mask, values):
    """A mask over leading axes, shaped to broadcast against `values`."""
    return mask.reshape(mask.shape + (1,) * (values.ndim - mask.ndim))
