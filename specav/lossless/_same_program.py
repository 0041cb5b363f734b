"""Whether two traced programs are the same, up to the names of variables."""

from typing import Any

import numpy as np
from jax.extend import core

# Derivatives: functions without an equality, and without a part in the values.
_DERIVATIVES = {"jvp", "jvp_jaxpr_fun", "jvp_jaxpr_thunk", "fwd", "fwd_jaxpr_thunk", "bwd", "out_trees"}


def same_program(a: Any, b: Any) -> bool:
    """Whether two jaxprs (closed, or with constants of their own) compute the same by the same equations.

    Constants are compared bit for bit. True is certain; False may also mean that a parameter of some primitive cannot
    be compared.
    """
    consts = [getattr(jaxpr, "consts", ()) for jaxpr in (a, b)]
    if len(consts[0]) != len(consts[1]) or not all(map(_same_array, *consts)):
        return False
    a, b = getattr(a, "jaxpr", a), getattr(b, "jaxpr", b)
    names: dict[Any, Any] = {}

    def bind(mine, theirs):
        if len(mine) != len(theirs):
            return False
        names.update(zip(mine, theirs))
        return all(x.aval == y.aval for x, y in zip(mine, theirs))

    def agree(mine, theirs):
        return len(mine) == len(theirs) and all(_same_operand(x, y, names) for x, y in zip(mine, theirs))

    if len(a.eqns) != len(b.eqns) or not (bind(a.constvars, b.constvars) and bind(a.invars, b.invars)):
        return False
    for x, y in zip(a.eqns, b.eqns):
        if x.primitive is not y.primitive or not agree(x.invars, y.invars) or not bind(x.outvars, y.outvars):
            return False
        if not _same_params(x.params, y.params):
            return False
    return agree(a.outvars, b.outvars)


def _same_operand(x, y, names):
    if isinstance(x, core.Literal) or isinstance(y, core.Literal):
        if not (isinstance(x, core.Literal) and isinstance(y, core.Literal)):
            return False
        return x.aval == y.aval and _same_array(x.val, y.val)
    return names[x] is y


def _same_params(a, b):
    return a.keys() == b.keys() and all(name in _DERIVATIVES or _same_value(a[name], b[name]) for name in a)


def _same_value(x, y):
    if x is y:
        return True
    if type(x) is not type(y):
        return False
    if hasattr(getattr(x, "jaxpr", x), "eqns"):
        return same_program(x, y)
    if isinstance(x, (tuple, list)) and not hasattr(x, "_fields"):
        return len(x) == len(y) and all(map(_same_value, x, y))
    if isinstance(x, np.ndarray) or hasattr(x, "__array__"):
        return _same_array(x, y)
    if type(x).__eq__ is not object.__eq__:
        return bool(x == y)
    # Descriptions of trees, which some versions of JAX keep in parameters.
    return "flattree" in type(x).__module__ and repr(x) == repr(y) and " at 0x" not in repr(x)


def _same_array(x, y):
    try:
        x, y = np.asarray(x), np.asarray(y)
    except TypeError:
        return x is y  # keys
    return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
