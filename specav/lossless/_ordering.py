"""What elementwise operations do to bounds, trends and threshold events of abstract values.

This is what lets a policy return a count: if slots 1..K of a mask go from true to false once, {count >= i} is slot i,
and reads no more than slot i does. Everything here only ever makes dependence sets smaller where a proof is at
hand; without one the sets of the values themselves stand.
"""

import numpy as np

from specav.lossless._abstract import (
    MAX_THRESHOLDS,
    Value,
    all_trends,
    dtype_bounds,
    event,
    fitted,
    joined,
    joint_window,
    never_nan,
    with_events,
)

COMPARISONS = {"ge", "gt", "le", "lt", "eq", "ne"}
_SWAPPED = {"ge": "le", "gt": "lt", "le": "ge", "lt": "gt", "eq": "eq", "ne": "ne"}
PASSES = {
    "copy", "copy_p", "optimization_barrier", "name", "stop_gradient", "sharding_constraint", "device_put", "pvary",
    "pcast", "reduce_precision",
}  # fmt: skip


def elementwise_facts(name: str, operands: list[Value], out: Value) -> Value:
    """A result with what can be said about its bounds, trends and events.

    Args:
      name: the primitive.
      operands: its operands, of the result's shape or broadcast to it.
      out: the result with its dependences and known elements.
    """
    out = out._replace(bounds=_bounds(name, operands, out.dtype)[0])
    out = out._replace(trends=frozenset(_trends(name, operands, out)))
    if name in COMPARISONS:
        return out._replace(deps=_compared(name, operands, out))
    return _events(name, operands, out)


def _bounds(name, operands, dtype):
    """Bounds of the result, and whether real arithmetic holds (no overflow)."""
    found = [value.bounds for value in operands]
    if name in PASSES and name != "reduce_precision" and found[0] is not None:
        return found[0], True
    if name == "select_n":
        found = found[1:]
    real = None
    if not any(pair is None for pair in found):
        (a, *rest) = found
        if name == "add":
            real = a[0] + rest[0][0], a[1] + rest[0][1]
        elif name == "sub":
            real = a[0] - rest[0][1], a[1] - rest[0][0]
        elif name == "neg":
            real = -a[1], -a[0]
        elif name == "mul":
            corners = [x * y for x in a for y in rest[0]]
            real = min(corners), max(corners)
        elif name in ("min", "max"):
            pick = min if name == "min" else max
            real = pick(a[0], rest[0][0]), pick(a[1], rest[0][1])
        elif name == "clamp":
            low, x, high = found
            real = min(max(x[0], low[0]), high[0]), min(max(x[1], low[1]), high[1])
        elif name == "select_n":
            real = min(pair[0] for pair in found), max(pair[1] for pair in found)
        elif name == "convert_element_type" and (dtype_bounds(dtype) != (0, 1) or 0 <= a[0] <= a[1] <= 1):
            real = a  # to bool is a comparison with 0
    return fitted(real, dtype)


# Trends.


def _trends(name, operands, out):
    rank = len(out.shape)
    for axis in range(rank):
        for sign in (-1, 1):
            has = lambda value, s, axis=axis: _has(value, axis, s, rank)  # noqa: E731
            if all(has(value, s) for value in operands for s in (-1, 1)) or _keeps(name, operands, out, sign, has):
                yield axis, sign


def _has(value, axis, sign, rank):
    return len(value.shape) < rank or (axis, sign) in all_trends(value)


def _keeps(name, operands, out, sign, has):
    """Whether the result has a trend, from the trends of the operands (`has(value, sign)`)."""
    if name in COMPARISONS:
        return _comparison_keeps(name, operands[0], operands[1], sign, has)
    real = _bounds(name, operands, out.dtype)[1]
    exact = real and all(value.bounds is not None for value in operands)
    if name in PASSES or name == "clamp" or name in ("min", "max"):
        return all(has(value, sign) for value in operands)
    if name in ("and", "or"):
        return _are_binary(operands) and all(has(value, sign) for value in operands)
    if name == "not":
        return has(operands[0], -sign)
    if name == "neg":
        return (exact or dtype_bounds(out.dtype) is None) and has(operands[0], -sign)
    if name == "add":
        return exact and all(has(value, sign) for value in operands)
    if name == "sub":
        return exact and has(operands[0], sign) and has(operands[1], -sign)
    if name == "mul":
        positive = exact and all(value.bounds[0] >= 0 for value in operands)
        return positive and all(has(value, sign) for value in operands)
    if name == "convert_element_type":
        to_float = dtype_bounds(out.dtype) is None and np.issubdtype(out.dtype, np.floating)
        return (exact or to_float) and has(operands[0], sign)
    if name == "select_n" and len(operands) == 3:
        return _selection_keeps(operands, sign, has)
    return False


def _comparison_keeps(name, a, b, sign, has):
    for x, y, op in ((a, b, name), (b, a, _SWAPPED[name])):
        if op in ("eq", "ne"):  # at an edge of what x can be, equality is an inequality
            if y.bounds is None or x.bounds is None or y.bounds[0] != y.bounds[1]:
                continue
            if y.bounds[0] <= x.bounds[0]:
                op = "le" if op == "eq" else "gt"
            elif y.bounds[0] >= x.bounds[1]:
                op = "ge" if op == "eq" else "lt"
            else:
                continue
        # True at first, then false: a tail of NaN is false as well. The other way round NaN would spoil it.
        direction = sign if op in ("ge", "gt") else -sign
        if (sign == -1 or (never_nan(x) and never_nan(y))) and has(x, direction) and has(y, -direction):
            return True
    return False


def _selection_keeps(operands, sign, has):
    predicate, at_false, at_true = operands
    if not (has(at_false, sign) and has(at_true, sign)):
        return False
    if has(predicate, 1) and has(predicate, -1):
        return True
    if predicate.bounds != (0, 1) or at_false.bounds is None or at_true.bounds is None:
        return False
    # The branch that comes first along the axis must lie on the right side of the one that comes last.
    first, last = (at_true, at_false) if has(predicate, -1) else (at_false, at_true)
    if not (has(predicate, 1) or has(predicate, -1)):
        return False
    return first.bounds[0] >= last.bounds[1] if sign == -1 else first.bounds[1] <= last.bounds[0]


def _are_binary(values):
    return all(value.bounds is not None and value.bounds[0] >= 0 and value.bounds[1] <= 1 for value in values)


# Events.


def _compared(name, operands, out):
    """Dependences of a comparison between a value with events and known numbers."""
    for x, y, op in ((*operands, name), (*operands[::-1], _SWAPPED[name])):
        if x.events is None or not y.is_known or y.bounds is None or x.bounds is None:
            continue
        at = _whole_numbers(y)
        if at is None:
            continue
        at = np.broadcast_to(at, out.shape)
        thresholds = {"ge": [at], "lt": [at], "gt": [at + 1], "le": [at + 1]}.get(op, [at, at + 1])
        return joined([_events_at(x, t) for t in thresholds], out.shape)
    return out.deps


def _events_at(value, thresholds):
    """What {value >= threshold} may depend on, uint64 [*shape, W], with a threshold for every element."""
    out = np.zeros((*thresholds.shape, value.deps.shape[-1]), np.uint64)
    for threshold in np.unique(thresholds):
        here = thresholds == threshold
        out[here] = np.broadcast_to(event(value, int(threshold)), out.shape)[here]
    return out


def _events(name, operands, out):
    if out.bounds is None or not any(value.events is not None for value in operands):
        return out
    if any(value.bounds is None for value in operands):
        return out
    if name in PASSES or name == "convert_element_type":
        source, exact = operands[0], _bounds(name, operands, out.dtype)[1]
        window = joint_window([source]) if exact else range(0)
        return with_events(out, window, [event(source, t) for t in window])
    if name == "clamp":
        low, x, high = operands
        raised = _extremum("max", [low, x], out._replace(bounds=_bounds("max", [low, x], out.dtype)[0]))
        return _extremum("min", [raised, high], out)
    if name in ("min", "max"):
        return _extremum(name, operands, out)
    if name == "select_n":
        return _selected(operands, out)
    if name == "mul":
        return _gated(operands, out)
    if name in ("add", "sub", "neg"):
        return _shifted(name, operands, out)
    return out


def _extremum(name, operands, out):
    """min(a, b) >= t if both are, max(a, b) >= t if one is; a known operand may settle it."""
    window, events = joint_window(operands), []
    for threshold in window:
        here = joined([event(value, threshold) for value in operands], out.shape)
        for value in operands:
            if value.is_known:
                settles = value.data < threshold if name == "min" else value.data >= threshold
                here = np.where(np.broadcast_to(settles, out.shape)[..., None], np.uint64(0), here)
        events.append(here)
    return with_events(out, window, events)


def _selected(operands, out):
    predicate, *cases = operands
    window = joint_window(cases)
    events = []
    for threshold in window:
        parts = [np.broadcast_to(predicate.deps, out.deps.shape)]
        for number, case in enumerate(cases):
            chosen = selectable(predicate, number, out.shape)
            parts.append(np.where(chosen[..., None], event(case, threshold), np.uint64(0)))
        events.append(joined(parts, out.shape))
    return with_events(out, window, events)


def selectable(predicate: Value, number: int, shape: tuple[int, ...]) -> np.ndarray:
    """Where `select_n` may take a case, bool [*shape]."""
    if predicate.known is None or predicate.data is None:
        return np.broadcast_to(True, shape)
    return np.broadcast_to(~predicate.known | (predicate.data == number), shape)


def _gated(operands, out):
    """value * gate >= t for t >= 1 and a gate of 0 or 1: the gate is open and value >= t."""
    for value, gate in (operands, operands[::-1]):
        if value.events is None or not _are_binary([gate]):
            continue
        window = joint_window([value])
        events = [joined([event(value, t), gate.deps], out.shape) if t >= 1 else out.deps for t in window]
        return with_events(out, window, events)
    return out


def _shifted(name, operands, out):
    """value + c >= t if value >= t - c, and -value >= t unless value >= 1 - t, for known c."""
    if not _bounds(name, operands, out.dtype)[1]:
        return out
    value, shift, sign = _as_shift(name, operands)
    if value is None or value.events is None:
        return out
    shift = np.broadcast_to(shift, out.shape)
    if not shift.size:
        return out
    size = value.events.shape[-2]
    edges = (value.low + 1, value.low + size) if sign > 0 else (1 - value.low - size, -value.low)
    window = range(edges[0] + int(shift.min()), edges[1] + int(shift.max()) + 1)
    if len(window) > MAX_THRESHOLDS:
        return out
    events = []
    for threshold in window:
        wanted = threshold - shift
        events.append(_events_at(value, wanted if sign > 0 else 1 - wanted))
    return with_events(out, window, events)


def _as_shift(name, operands):
    """An operation as sign * value + shift with known whole shifts: (value or None, shift int64, sign)."""
    if name == "neg":
        return operands[0], np.int64(0), -1
    a, b = operands
    known = a if a.is_known else b
    shift = _whole_numbers(known)
    if shift is None:
        return None, np.int64(0), 1
    if known is b:
        return a, shift if name == "add" else -shift, 1
    return b, shift, 1 if name == "add" else -1


def _whole_numbers(value):
    """Known data as int64; None if not known, not whole, or large."""
    if not value.is_known or value.bounds is None or max(map(abs, value.bounds)) > 2**40:
        return None
    return np.asarray(value.data, np.float64).astype(np.int64)


def counted(mask: Value, axis: int, out: Value) -> Value:
    """The sum of zeros and ones along an axis: if they never increase, {count >= i} is element i, see above."""
    size, trends = mask.shape[axis], all_trends(mask)
    if not _are_binary([mask]) or out.bounds is None or not fitted((0, size), out.dtype)[1]:
        return out
    if size > MAX_THRESHOLDS or not {(axis, -1), (axis, 1)} & trends:
        return out
    order = range(size) if (axis, -1) in trends else reversed(range(size))
    window = range(1, size + 1)
    return with_events(out, window, [np.take(mask.deps, i, axis) for i in order])


def first_position(mask: Value, axis: int, wanted: int, out: Value) -> Value:
    """The first 0 or 1 along an axis, if the last element is known to be one: {position >= i} reads the first i."""
    size = mask.shape[axis]
    if mask.known is None or mask.data is None or not _are_binary([mask]) or not 0 < size <= MAX_THRESHOLDS:
        return out
    last_known, last = np.take(mask.known, size - 1, axis), np.take(mask.data, size - 1, axis)
    if out.bounds is None or not np.all(last_known & (last == wanted)):
        return out
    read = np.bitwise_or.accumulate(mask.deps, axis)
    return with_events(out, range(1, size), [np.take(read, i - 1, axis) for i in range(1, size)])
