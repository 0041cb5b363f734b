"""Trace-time checks of arguments: every error names the argument, what was given and what was expected.

Shapes are written as in the rest of the package ("B K", "... V", "K"). Names are bound at their first use, so
that a later argument is held to the sizes of the earlier ones; numbers stand for themselves.
"""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_KINDS = {
    "float": (jnp.floating, "a float dtype"),
    "int": (jnp.integer, "an integer dtype"),
    "bool": (jnp.bool_, "bool"),
    "real": (jnp.number, "a real dtype"),
}


def shaped(dims: dict[str, Any], name: str, value: Any, spec: str, kind: str) -> jax.Array:
    """Returns `value` as an array after checking its shape and dtype.

    Args:
      dims: sizes bound so far, by axis name; changed in place.
      name: the argument's name, for the message.
      value: array-like.
      spec: axis names or numbers separated by blanks; a leading "..." stands for any axes (bound as well).
      kind: "float", "int", "bool" or "real" (float or integer, not bool).

    Raises:
      TypeError: the dtype is of another kind, or `value` is not array-like.
      ValueError: the shape does not fit.
    """
    try:
        array = jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name}: expected an array [{_show(spec, dims)}], got {type(value).__name__}") from error
    dtype, words = _KINDS[kind]
    if not jnp.issubdtype(array.dtype, dtype) or jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise TypeError(f"{name}: expected {words}, got {array.dtype}")
    axes = spec.split()
    shape: tuple[Any, ...] = array.shape
    if axes and axes[0] == "...":
        cut = len(shape) - (len(axes) - 1)
        if cut >= 0:
            shape = (shape[:cut], *shape[cut:])
    fits = len(axes) == len(shape)
    if fits:
        bound = dict(dims)
        for axis, size in zip(axes, shape, strict=True):
            wanted = int(axis) if axis.isdigit() else bound.setdefault(axis, size)
            fits = fits and wanted == size
        if fits:
            dims.update(bound)
    if not fits:
        raise ValueError(f"{name}: expected shape [{_show(spec, dims)}], got {list(array.shape)}")
    return array


def one_of(name: str, value: Any, options: Iterable[str]) -> Any:
    """Returns `value` if it is one of `options`; raises ValueError with the list otherwise."""
    options = tuple(options)
    if value not in options:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, options))}, got {value!r}")
    return value


def static_int(name: str, value: Any, minimum: int) -> int:
    """Returns `value` as a Python int at least `minimum`; raises TypeError or ValueError otherwise."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name}: expected a Python int, got {type(value).__name__}")
    if value < minimum:
        raise ValueError(f"{name}: expected an int of at least {minimum}, got {value}")
    return int(value)


def static_float(name: str, value: Any, low: float, high: float = float("inf")) -> float:
    """Returns `value` as a Python float in [low, high]; raises TypeError or ValueError otherwise."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name}: expected a Python float, got {type(value).__name__}")
    if not low <= value <= high:  # also refuses NaN
        raise ValueError(f"{name}: expected a number in [{low}, {high}], got {value}")
    return float(value)


def _show(spec: str, dims: dict[str, Any]) -> str:
    """The expected shape in words: "B K" with B bound to 4 gives "B=4, K"."""
    words = []
    for axis in spec.split():
        size = dims.get(axis)
        words.append(axis if size is None else f"{axis}={list(size) if isinstance(size, tuple) else size}")
    return ", ".join(words)
