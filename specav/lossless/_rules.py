"""Dependence rules, one per kind of primitive: what an output element reads of the operands.

Rules are exact where a primitive reads the same elements whatever the values are. Where that is in doubt a set may only
grow, and a primitive without a rule reads everything for every output, under its name.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from specav.lossless._abstract import (
    Value,
    all_trends,
    concatenated,
    constant,
    dtype_bounds,
    fitted,
    joined,
    moved,
    no_deps,
    picked,
    union,
    unknown,
)
from specav.lossless._ordering import PASSES, counted, elementwise_facts, first_position, selectable

_ELEMENTWISE = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex conj
    convert_element_type cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igammac imag
    integer_pow is_finite le le_to lgamma log log1p logistic lt lt_to max min mul ne neg nextafter not or polygamma
    population_count pow real regularized_incomplete_beta rem round rsqrt select_n shift_left shift_right_arithmetic
    shift_right_logical sign sin sinh sqrt square sub tan tanh xor zeta
"""
ELEMENTWISE = PASSES | set(_ELEMENTWISE.split())
CUMULATIVE = {"cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"}
REDUCTIONS = {
    "reduce_sum", "reduce_prod", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_xor", "argmax", "argmin"
}  # fmt: skip
# Evaluated when all operands are known: the same value on every device and in every round.
FOLDED = {
    "iota", "broadcast_in_dim", "reshape", "transpose", "squeeze", "slice", "rev", "concatenate", "pad", "tile",
    "dynamic_slice", "dynamic_update_slice", "gather", "scatter", "scatter-add", "sort", "dot_general", "stack",
    "bitcast_convert_type", "split", *REDUCTIONS, *CUMULATIVE, *(ELEMENTWISE - PASSES),
}  # fmt: skip


def fold(eqn: Any, values: Sequence[Value], words: int) -> list[Value] | None:
    """The outputs as constants, if the operands are known and the primitive may be evaluated now; else None."""
    if eqn.primitive.name not in FOLDED or eqn.effects or not all(value.is_known for value in values):
        return None
    out = eqn.primitive.bind(*(jnp.asarray(value.data) for value in values), **eqn.params)
    out = out if eqn.primitive.multiple_results else [out]
    return [constant(array, var.aval.dtype, words) for array, var in zip(out, eqn.outvars)]


def elementwise(name: str, operands: Sequence[Value], shape: tuple[int, ...], dtype: Any) -> Value:
    """The result of an elementwise primitive: element by element the union of what its operands read."""
    operands = list(operands)
    if name == "select_n":
        return elementwise_facts(name, operands, _select(operands, shape, dtype))
    reading = [value.deps for value in operands if not value.is_known]
    deps = joined(reading, shape) if reading else no_deps(shape, operands[0].deps.shape[-1])
    out = _settle(name, operands, Value(deps, dtype))
    if name == "not" and operands[0].data is not None:  # sentinels of an argmax
        out = out._replace(known=operands[0].known, data=np.invert(operands[0].data))
    elif name == "convert_element_type" and operands[0].data is not None and dtype_bounds(dtype) is not None:
        known = np.asarray(operands[0].known)
        if fitted(operands[0].bounds, dtype)[1] and (dtype != jnp.bool_ or operands[0].dtype == jnp.bool_):
            out = out._replace(known=known, data=np.where(known, operands[0].data, 0).astype(dtype))
    elif name in PASSES and name != "reduce_precision":
        out = out._replace(known=operands[0].known, data=operands[0].data)
    return elementwise_facts(name, operands, out)


def _select(operands, shape, dtype):
    """`select_n`: where the predicate is known, one case alone."""
    predicate, *cases = operands
    parts = [np.broadcast_to(predicate.deps, (*shape, predicate.deps.shape[-1]))]
    known, data = np.zeros(shape, bool), np.zeros(shape, dtype)
    for number, case in enumerate(cases):
        may = selectable(predicate, number, shape)
        parts.append(np.where(may[..., None], case.deps, np.uint64(0)))
        if predicate.known is not None and case.known is not None:
            here = np.broadcast_to(predicate.known, shape) & may & case.known
            known, data = known | here, np.where(here, case.data, data)
    return Value(joined(parts, shape), dtype, known if known.any() else None, data if known.any() else None)


def _settle(name, operands, out):
    """Elements that a known operand decides alone: false and x, 0 * x for whole numbers (for floats x may be NaN)."""
    limits = dtype_bounds(out.dtype)
    if len(operands) != 2 or limits is None or name not in ("and", "or", "mul", "min", "max"):
        return out
    ones = -1 if limits[0] < 0 else limits[1]
    known = data = None
    for value, other in (operands, operands[::-1]):
        if value.known is None or value.data is None or other.bounds is None:
            continue
        decides = {
            "and": lambda d: d == 0,
            "mul": lambda d: d == 0,
            "or": lambda d, ones=ones: d == ones,
            "min": lambda d, o=other: d <= o.bounds[0],
            "max": lambda d, o=other: d >= o.bounds[1],
        }[name](value.data)
        here = np.broadcast_to(value.known & decides, out.shape)
        known = here if known is None else known | here
        data = np.where(here, value.data, np.zeros(out.shape, out.dtype) if data is None else data)
    if known is None or not known.any():
        return out
    return out._replace(deps=np.where(known[..., None], np.uint64(0), out.deps), known=known, data=data)


# Data movement.


def broadcast_in_dim(value: Value, params: dict) -> Value:
    """New and stretched axes repeat their elements."""
    shape, axes = tuple(params["shape"]), tuple(params["broadcast_dimensions"])
    ones = [1] * len(shape)
    for axis, size in zip(axes, value.shape):
        ones[axis] = size
    trends = {(axes[axis], sign) for axis, sign in all_trends(value)}
    trends |= {(axis, sign) for axis in range(len(shape)) if ones[axis] == 1 for sign in (-1, 1)}
    rank = len(value.shape)

    def move(array):
        trail = array.shape[rank:]
        return np.broadcast_to(array.reshape((*ones, *trail)), (*shape, *trail))

    return moved(value, move, frozenset(trends))


def reshape(value: Value, shape: tuple[int, ...]) -> Value:
    """The same elements in row-major order; trends survive where only axes of size 1 come and go."""
    rank, trends = len(value.shape), set()
    old = [axis for axis, size in enumerate(value.shape) if size != 1]
    new = [axis for axis, size in enumerate(shape) if size != 1]
    if [value.shape[axis] for axis in old] == [shape[axis] for axis in new]:
        renamed = dict(zip(old, new))
        trends = {(renamed[axis], sign) for axis, sign in all_trends(value) if axis in renamed}
    return moved(value, lambda array: array.reshape((*shape, *array.shape[rank:])), frozenset(trends))


def transpose(value: Value, permutation: Sequence[int]) -> Value:
    """Axes in another order."""
    rank = len(value.shape)
    trends = frozenset((permutation.index(axis), sign) for axis, sign in all_trends(value))
    move = lambda array: array.transpose((*permutation, *range(rank, array.ndim)))  # noqa: E731
    return moved(value, move, trends)


def slice_(value: Value, params: dict) -> Value:
    """Static slices."""
    strides = params["strides"] or (1,) * len(value.shape)
    index = tuple(map(slice, params["start_indices"], params["limit_indices"], strides))
    return moved(value, lambda array: array[index], frozenset(all_trends(value)))


def rev(value: Value, axes: Sequence[int]) -> Value:
    """Axes backwards. Trends are kept for values that cannot end in NaN."""
    rank = len(value.shape)
    trends = {(axis, -sign if axis in axes else sign) for axis, sign in all_trends(value)}
    if value.bounds is None:
        trends = {(axis, sign) for axis, sign in trends if axis not in axes}
    index = tuple(slice(None, None, -1) if axis in axes else slice(None) for axis in range(rank))
    return moved(value, lambda array: array[index], frozenset(trends))


def by_number(eqn: Any, values: Sequence[Value]) -> list[Value]:
    """Any primitive that only moves elements: it is run on their numbers."""
    sizes = [int(np.prod(value.shape)) for value in values]
    starts = np.cumsum([0, *sizes])
    numbers = [
        jnp.asarray(np.arange(start, start + size, dtype=np.int32).reshape(value.shape))
        for value, start, size in zip(values, starts, sizes)
    ]
    out = eqn.primitive.bind(*numbers, **eqn.params)
    out = out if eqn.primitive.multiple_results else [out]
    return [picked(list(values), np.asarray(ids), var.aval.dtype) for ids, var in zip(out, eqn.outvars)]


def stack(values: Sequence[Value], axis: int, dtype: Any) -> Value:
    """Values along a new axis."""
    shape = values[0].shape
    wide = [reshape(value, (*shape[:axis], 1, *shape[axis:])) for value in values]
    return concatenated(wide, axis, dtype)


# Reductions.


def cumulative(name: str, value: Value, params: dict) -> Value:
    """Element i reads elements up to i (from i on, if reversed)."""
    axis, back = params["axis"], params["reverse"]
    turned = np.flip(value.deps, axis) if back else value.deps
    deps = np.bitwise_or.accumulate(turned, axis)
    deps = np.flip(deps, axis) if back else deps
    size = value.shape[axis]
    low, high = value.bounds or (0, 0)
    real = {
        "cumsum": (min(low, size * low), max(high, size * high)),
        "cummin": (low, high),
        "cummax": (low, high),
        "cumprod": (low, high) if low >= 0 and high <= 1 else None,
    }.get(name)
    bounds, exact = fitted(real if value.bounds is not None else None, value.dtype)
    sign = 0
    if name in ("cummin", "cummax") and not (back and bounds is None):  # a reversed one could begin with NaN
        sign = -1 if name == "cummin" else 1
    elif exact and name == "cumprod":
        sign = -1
    elif exact and name == "cumsum":
        sign = 1 if low >= 0 else (-1 if high <= 0 else 0)
    trends = frozenset({(axis, -sign if back else sign)} if sign else ())
    return Value(deps, value.dtype, bounds=bounds, trends=trends)


def reduction(name: str, value: Value, axes: Sequence[int], dtype: Any) -> Value:
    """The result reads all elements along the axes."""
    axes = tuple(axes)
    deps = np.bitwise_or.reduce(value.deps, axes) if axes else value.deps
    out = Value(deps, dtype, bounds=dtype_bounds(dtype))
    count = int(np.prod([value.shape[axis] for axis in axes], dtype=np.int64))
    if name in ("argmax", "argmin"):
        out = out._replace(bounds=(0, max(count - 1, 0)))
        return first_position(value, int(axes[0]), int(name == "argmax"), out)
    if value.bounds is None or not count:
        return out
    low, high = value.bounds
    if name in ("reduce_max", "reduce_min"):
        return out._replace(bounds=value.bounds)
    if name == "reduce_sum":
        out = out._replace(bounds=fitted((count * low, count * high), dtype)[0])
        return counted(value, int(axes[0]), out) if len(axes) == 1 else out
    return out


def dot_general(lhs: Value, rhs: Value, params: dict) -> np.ndarray:
    """Dependences [*batch, *free left, *free right, W]: each side joined over its contracted axes."""
    (left_sum, right_sum), (left_batch, right_batch) = params["dimension_numbers"]

    def free(value, summed, batch):
        rest = [axis for axis in range(len(value.shape)) if axis not in (*summed, *batch)]
        ordered = value.deps.transpose((*batch, *rest, *summed, len(value.shape)))
        joined_axes = tuple(range(len(batch) + len(rest), len(batch) + len(rest) + len(summed)))
        return (np.bitwise_or.reduce(ordered, joined_axes) if summed else ordered), len(rest)

    (left, num_left), (right, num_right) = free(lhs, left_sum, left_batch), free(rhs, right_sum, right_batch)
    num_batch = len(left_batch)
    left = left.reshape((*left.shape[:-1], *(1,) * num_right, left.shape[-1]))
    right = right.reshape((*right.shape[:num_batch], *(1,) * num_left, *right.shape[num_batch:]))
    return left | right


def bitcast(value: Value, shape: tuple[int, ...], dtype: Any) -> Value:
    """Bits as another dtype; elements are split into, or joined from, a last axis if widths differ."""
    if len(shape) == len(value.shape):
        return unknown(value.deps, dtype)
    if len(shape) > len(value.shape):
        return unknown(np.broadcast_to(value.deps[..., None, :], (*shape, value.deps.shape[-1])), dtype)
    return unknown(np.bitwise_or.reduce(value.deps, -2), dtype)


def along(values: Sequence[Value], axis: int, shape: tuple[int, ...]) -> np.ndarray:
    """Every element reads all elements of its line along an axis, of all operands; uint64 [*shape, W]."""
    axis = axis % len(shape)
    lines = [np.bitwise_or.reduce(value.deps, axis, keepdims=True) for value in values]
    line = lines[0]
    for other in lines[1:]:
        line = line | other
    return np.broadcast_to(line, (*shape, line.shape[-1]))


def everything(values: Sequence[Value], words: int) -> np.ndarray:
    """The union [W] of all operands."""
    out = np.zeros(words, np.uint64)
    for value in values:
        if not value.is_known:
            out = out | union(value.deps)
    return out
