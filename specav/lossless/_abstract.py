"""Abstract values of the dependence analysis: what is known of an array without knowing the inputs.

Dependence sets are packed bits, uint64 words [*shape, W]; one bit per element of a tracked input, and one word of
bits that name the primitives through which a set was only over-estimated. Constants are zero-stride views.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

MAX_THRESHOLDS = 256
LEAST_THRESHOLD = -8
MAX_EVENT_BYTES = 2**28


class Value(NamedTuple):
    """An array of the traced program, abstractly.

    Attributes:
      deps: uint64 [*shape, W], which inputs each element may depend on.
      dtype: of the array.
      known: bool [*shape], elements whose value is the same for all inputs and at hand; None: none is.
      data: the values where known, anything elsewhere.
      bounds: (low, high) if every element is a whole number in low..high, for float dtypes too (then never NaN).
      trends: pairs (axis, sign): along the axis the elements never decrease (+1) or never increase (-1). Floats may
        end in NaN: from the first NaN on, all are.
      low, events: uint64 [*shape, N, W], what each event {value >= low + i}, i = 1..N, may depend on: less, perhaps,
        than the value. None: no more than `deps` is known. Present only if `bounds` are.
    """

    deps: np.ndarray
    dtype: Any
    known: np.ndarray | None = None
    data: np.ndarray | None = None
    bounds: tuple[int, int] | None = None
    trends: frozenset[tuple[int, int]] = frozenset()
    low: int = 0
    events: np.ndarray | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self.deps.shape[:-1]

    @property
    def is_known(self) -> bool:
        """Whether every element is known."""
        return self.known is not None and bool(self.known.all())

    @property
    def depends(self) -> bool:
        """Whether any element depends on a tracked input."""
        return not self.is_known and bool(self.deps.any())


def constant(data: Any, dtype: Any, words: int) -> Value:
    """A known array; its bounds and trends are read off the data."""
    data = np.asarray(data)
    whole = dtype == jnp.bool_ or jnp.issubdtype(dtype, jnp.integer)
    bounds = dtype_bounds(dtype)
    if data.size and (whole or _all_whole(data)):
        bounds = fitted((int(data.min()), int(data.max())), dtype)[0]
    value = Value(no_deps(data.shape, words), dtype, np.broadcast_to(True, data.shape), data, bounds)
    return value._replace(trends=_trends_of(data))


def unknown(deps: np.ndarray, dtype: Any) -> Value:
    """An array of which only the dependences are known."""
    return Value(deps, dtype, bounds=dtype_bounds(dtype))


def no_deps(shape: tuple[int, ...], words: int) -> np.ndarray:
    """Empty dependence sets [*shape, words]; takes no memory, read-only."""
    return np.broadcast_to(np.zeros(words, np.uint64), (*shape, words))


def joined(arrays: list[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """Unions of dependence sets, broadcast to [*shape, W]."""
    out = np.broadcast_to(arrays[0], (*shape, arrays[0].shape[-1]))
    for array in arrays[1:]:
        if array.any():
            out = out | array
    return out


def union(deps: np.ndarray) -> np.ndarray:
    """The union [W] of all sets of an array."""
    return np.bitwise_or.reduce(deps.reshape(-1, deps.shape[-1]), axis=0)


def moved(value: Value, move: Callable[[np.ndarray], np.ndarray], trends: frozenset = frozenset()) -> Value:
    """A rearrangement of a value's elements; `move` takes arrays [*shape, ...] with any trailing axes."""
    return value._replace(
        deps=move(value.deps),
        known=None if value.known is None else move(value.known),
        data=None if value.data is None else move(value.data),
        events=None if value.events is None else move(value.events),
        trends=trends,
    )


def picked(values: list[Value], ids: np.ndarray, dtype: Any) -> Value:
    """Elements of several values laid end to end, by number; negative numbers are elements of no value."""
    flat = [flattened(value) for value in values]
    table = flat[0] if len(flat) == 1 else concatenated(flat, 0, dtype)
    outside = ids < 0
    out = moved(table, lambda array: array[np.where(outside, 0, ids)])
    if not outside.any():
        return out
    keep = ~outside
    known = None if out.known is None else out.known & keep
    return unknown(out.deps * keep[..., None].astype(np.uint64), dtype)._replace(known=known, data=out.data)


def flattened(value: Value) -> Value:
    """The elements in one axis."""
    rank = len(value.shape)
    return moved(value, lambda array: array.reshape((-1, *array.shape[rank:])))


def concatenated(values: list[Value], axis: int, dtype: Any) -> Value:
    """Values side by side along an axis."""
    shape = list(values[0].shape)
    shape[axis] = sum(value.shape[axis] for value in values)
    known = data = None
    if any(value.known is not None for value in values):
        known = np.concatenate([_known(value) for value in values], axis)
        data = np.concatenate([_data(value) for value in values], axis)
    deps = np.concatenate([value.deps for value in values], axis)
    trends = set.intersection(*(set(all_trends(value)) for value in values))
    window = joint_window(values)
    out = Value(deps, dtype, known, data, hull([value.bounds for value in values]))
    out = out._replace(trends=frozenset(trend for trend in trends if trend[0] != axis))
    events = [np.concatenate([event(value, t) for value in values], axis) for t in window]
    return with_events(out, window, events)


def _known(value):
    return np.broadcast_to(False, value.shape) if value.known is None else value.known


def _data(value):
    return np.zeros(value.shape, value.dtype) if value.data is None else value.data


# Bounds, trends, events.


def dtype_bounds(dtype: Any) -> tuple[int, int] | None:
    """Least and largest value of a whole-number dtype; None for others."""
    if dtype == jnp.bool_:
        return 0, 1
    if jnp.issubdtype(dtype, jnp.integer):
        return int(jnp.iinfo(dtype).min), int(jnp.iinfo(dtype).max)
    return None


def fitted(bounds: tuple[int, int] | None, dtype: Any) -> tuple[tuple[int, int] | None, bool]:
    """Bounds in real arithmetic as bounds in a dtype, and whether it is exact there (no wrap, no rounding)."""
    limits = dtype_bounds(dtype)
    if limits is None and jnp.issubdtype(dtype, jnp.floating):
        largest = 2 ** (jnp.finfo(dtype).nmant + 1)
        limits = (-largest, largest)
    if bounds is not None and limits is not None and limits[0] <= bounds[0] and bounds[1] <= limits[1]:
        return bounds, True
    return dtype_bounds(dtype), False


def hull(bounds: list[tuple[int, int] | None]) -> tuple[int, int] | None:
    """Bounds that hold for elements of any of several values."""
    found = [pair for pair in bounds if pair is not None]
    return (min(b[0] for b in found), max(b[1] for b in found)) if len(found) == len(bounds) else None


def all_trends(value: Value) -> set[tuple[int, int]]:
    """The value's trends; an axis of size at most 1 has both."""
    single = [axis for axis, size in enumerate(value.shape) if size <= 1]
    return set(value.trends) | {(axis, sign) for axis in single for sign in (-1, 1)}


def never_nan(value: Value) -> bool:
    """Whether no element can be NaN."""
    return value.bounds is not None or dtype_bounds(value.dtype) is not None


def event(value: Value, threshold: int) -> np.ndarray:
    """uint64 [*shape, W]: what {value >= threshold} may depend on, for a value with bounds."""
    if value.bounds is None:
        return value.deps
    if value.is_known or threshold <= value.bounds[0] or threshold > value.bounds[1]:
        return no_deps(value.shape, value.deps.shape[-1])
    if value.events is not None and value.low < threshold <= value.low + value.events.shape[-2]:
        return value.events[..., threshold - value.low - 1, :]
    return value.deps


def joint_window(values: list[Value]) -> range:
    """Thresholds at which at least one of several values has events of its own; empty if they are too many.

    A few more below and at 1, where one value may settle an event that reads another one elsewhere.
    """
    annotated = [value for value in values if value.events is not None]
    if not annotated or any(value.bounds is None for value in values):
        return range(0)
    low = min(value.low for value in annotated)
    high = max(value.low + value.events.shape[-2] for value in annotated if value.events is not None)
    window = range(min(low + 1, LEAST_THRESHOLD), max(high + 1, 2))
    return window if len(window) <= MAX_THRESHOLDS else range(0)


def with_events(value: Value, window: range, events: list[np.ndarray]) -> Value:
    """The value with the dependences [*shape, W] of {value >= t} for every t of a window, if there is room for them."""
    if not len(window) or value.bounds is None or value.deps.size * 8 * len(window) > MAX_EVENT_BYTES:
        return value._replace(low=0, events=None)
    stacked = np.stack([np.broadcast_to(e, value.deps.shape) for e in events], axis=-2)
    if value.known is not None:
        stacked[value.known] = 0
    return value._replace(low=window.start - 1, events=stacked)


def _all_whole(data):
    return jnp.issubdtype(data.dtype, jnp.floating) and bool(
        np.all(np.isfinite(data)) and np.all(data == np.floor(data))
    )


def _trends_of(data):
    if data.dtype.kind not in "biuf" or not data.size or (data.dtype.kind == "f" and np.isnan(data).any()):
        return frozenset()
    found = set()
    for axis in range(data.ndim):
        before, after = (
            np.take(data, range(data.shape[axis] - 1), axis),
            np.take(data, range(1, data.shape[axis]), axis),
        )
        found |= {(axis, 1)} if np.all(before <= after) else set()
        found |= {(axis, -1)} if np.all(before >= after) else set()
    return frozenset(found)
