"""The abstract interpreter: a traced program run on dependence sets instead of numbers."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from specav.lossless import _indexing, _rules
from specav.lossless._abstract import Value, concatenated, constant, dtype_bounds, moved, no_deps, unknown

# Loops whose number of steps is known are unrolled up to so many steps.
MAX_STEPS = 64
_CALLS = {
    "jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2", "custom_jvp_call", "custom_vjp_call",
    "custom_vjp_call_jaxpr",
}  # fmt: skip
# What such a primitive returns is not a function of its operands.
_OUTSIDE = ("callback", "ffi", "custom_call", "infeed", "outfeed", "recv")


class Interpreter:
    """Runs jaxprs on abstract values.

    Attributes:
      num_bits: tracked input elements; bit n of a dependence set is element n.
      words: uint64 words per set; the last one holds a bit per primitive that was treated conservatively.
      reasons: the names of these primitives, in the order of their bits.
      outside: those of them whose results may come from anywhere, untracked inputs included.
    """

    def __init__(self, num_bits: int):
        self.num_bits = num_bits
        self.words = -(-num_bits // 64) + 1
        self.reasons: list[str] = []
        self.outside: set[str] = set()

    def tracked(self, shape: tuple[int, ...], dtype: Any, first: int) -> Value:
        """An input whose elements are the bits from `first` on."""
        size = int(np.prod(shape))
        deps, number = np.zeros((size, self.words), np.uint64), first + np.arange(size)
        deps[np.arange(size), number // 64] = np.uint64(1) << (number % 64).astype(np.uint64)
        return unknown(deps.reshape((*shape, self.words)), dtype)

    def past(self, shape: tuple[int, ...], dtype: Any) -> Value:
        """An array that reads no tracked input, of unknown values."""
        return unknown(no_deps(shape, self.words), dtype)

    def run(self, jaxpr: Any, consts: Sequence[Value], args: Sequence[Value], needed: Sequence[bool]) -> list[Value]:
        """The outputs of a jaxpr; those that are not needed may say anything."""
        env: dict[Any, Value] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
        wanted = {var for var, need in zip(jaxpr.outvars, needed) if need and not isinstance(var, core.Literal)}
        plan, alive = [], set(wanted)
        for eqn in reversed(jaxpr.eqns):  # only what the needed outputs read
            if not alive.intersection(eqn.outvars):
                continue
            inputs = {var for var in eqn.invars if not isinstance(var, core.Literal)}
            plan.append((eqn, [var in alive for var in eqn.outvars], inputs - alive))
            alive |= inputs
        for eqn, need, last_read in reversed(plan):
            values = [self._read(env, var) for var in eqn.invars]
            for var, value in zip(eqn.outvars, self._step(eqn, values, need)):
                env[var] = value
            for var in last_read:
                del env[var]
        return [self._read(env, var) if need else self._blank(var) for var, need in zip(jaxpr.outvars, needed)]

    def open(self, jaxpr: Any) -> tuple[Any, list[Value]] | None:
        """(jaxpr, constants) of a closed jaxpr or of an inner one; None if the constants are not at hand."""
        if jaxpr is None:
            return None
        consts = getattr(jaxpr, "consts", ())
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        if len(jaxpr.constvars) != len(consts) or any(_is_reference(var) for var in jaxpr.constvars):
            return None
        return jaxpr, [self._constant(array, var.aval) for array, var in zip(consts, jaxpr.constvars)]

    def conservative(self, name: str, deps: np.ndarray) -> np.ndarray:
        """Dependence sets, marked as over-estimated by a primitive where they are not empty."""
        some = deps.any(axis=-1, keepdims=True)
        return np.where(some, self._marked(name, deps), deps) if some.any() else deps

    def reason_bits(self) -> dict[str, int]:
        """The bit of the last word by which every reason is marked; the last bit may stand for several."""
        return {name: min(number, 63) for number, name in enumerate(self.reasons)}

    def _marked(self, name, deps):
        if name not in self.reasons:
            self.reasons.append(name)
        mark = np.zeros(self.words, np.uint64)
        mark[-1] = np.uint64(1) << np.uint64(self.reason_bits()[name])
        return deps | mark

    # One equation.

    def _step(self, eqn, values, need):
        name = eqn.primitive.name
        if any(_is_reference(var) for var in (*eqn.invars, *eqn.outvars)) or _reads_outside(eqn):
            return self._everything(eqn)
        if name in _CALLS:
            return self._call(eqn, values, need)
        if eqn.effects:
            return self._everything(eqn)
        folded = _rules.fold(eqn, values, self.words)
        if folded is not None:
            return folded
        if name == "cond":
            return self._cond(eqn, values, need)
        if name in ("scan", "while"):
            return self._scan(eqn, values) if name == "scan" else self._while(eqn, values)
        found = self._rule(name, eqn, values)
        return self._default(eqn, values) if found is None else found

    def _rule(self, name, eqn, values):
        """The outputs by the primitive's own rule; None if it has none."""
        params, avals = eqn.params, [var.aval for var in eqn.outvars]
        shape, dtype = avals[0].shape, avals[0].dtype
        if name in _rules.PASSES:
            return [_rules.elementwise(name, [value], aval.shape, aval.dtype) for value, aval in zip(values, avals)]
        if name in _rules.ELEMENTWISE:
            return [_rules.elementwise(name, values, shape, dtype)]
        if name in _rules.CUMULATIVE:
            return [_rules.cumulative(name, values[0], params)]
        if name in _rules.REDUCTIONS:
            return [_rules.reduction(name, values[0], params["axes"], dtype)]
        if name in ("pad", "tile", "split"):
            return _rules.by_number(eqn, values)
        if name in ("sort", "top_k"):
            axis = params["dimension"] if name == "sort" else params.get("axis", params.get("operand_axis", -1))
            lines = [_rules.along(values, axis, aval.shape) for aval in avals]
            return [unknown(self.conservative(name, line), aval.dtype) for line, aval in zip(lines, avals)]
        if name in ("gather", "dynamic_slice", "dynamic_update_slice") or name in _indexing.SCATTERS:
            return self._indexed(name, values, params, dtype)
        if name == "concatenate":
            return [concatenated(values, int(params["dimension"]), dtype)]
        if name == "stack":
            return [_rules.stack(values, int(params["axis"]), dtype)]
        if name == "dot_general":
            return [unknown(_rules.dot_general(values[0], values[1], params), dtype)]
        if name == "bitcast_convert_type":
            return [_rules.bitcast(values[0], shape, dtype)]
        if len(values) != 1:
            return None
        if name == "broadcast_in_dim":
            return [_rules.broadcast_in_dim(values[0], params)]
        if name == "squeeze" or (name == "reshape" and params["dimensions"] is None):
            return [_rules.reshape(values[0], shape)]
        if name == "transpose":
            return [_rules.transpose(values[0], params["permutation"])]
        if name == "slice":
            return [_rules.slice_(values[0], params)]
        if name == "rev":
            return [_rules.rev(values[0], params["dimensions"])]
        return None

    def _indexed(self, name, values, params, dtype):
        if name == "gather":
            value, exact = _indexing.gather(values[0], values[1], params, dtype)
        elif name == "dynamic_slice":
            value, exact = _indexing.dynamic_slice(values[0], values[1:], params)
        elif name == "dynamic_update_slice":
            value, exact = _indexing.dynamic_update_slice(values[0], values[1], values[2:])
        else:
            value, exact = _indexing.scatter(name, values[0], values[1], values[2], params)
        return [value if exact else unknown(self.conservative(name, value.deps), dtype)]

    # Inner programs.

    def _call(self, eqn, values, need):
        inner = next((eqn.params[key] for key in ("call_jaxpr", "fun_jaxpr", "jaxpr") if key in eqn.params), None)
        opened = self.open(inner)
        if opened is None or len(opened[0].invars) != len(values) or len(opened[0].outvars) != len(eqn.outvars):
            return self._everything(eqn) if eqn.effects else self._default(eqn, values)
        return self.run(opened[0], opened[1], values, need)

    def _cond(self, eqn, values, need):
        index, *args = values
        opened = [self.open(branch) for branch in eqn.params["branches"]]
        branches = [branch for branch in opened if branch is not None and len(branch[0].invars) == len(args)]
        if len(branches) < len(opened):
            return self._default(eqn, values)
        if index.is_known:
            chosen = min(max(int(np.asarray(index.data)), 0), len(branches) - 1)
            return self.run(branches[chosen][0], branches[chosen][1], args, need)
        results = [self.run(inner, consts, args, need) for inner, consts in branches]
        index = index._replace(deps=self.conservative(eqn.primitive.name, index.deps))
        out = []
        for number, var in enumerate(eqn.outvars):
            cases = [result[number] for result in results]
            out.append(self._either(index, cases, var.aval) if need[number] else self._blank(var))
        return out

    def _either(self, index, cases, aval):
        """One of several values, chosen by a scalar."""
        if len(cases) == 2 and dtype_bounds(aval.dtype) is not None:
            return _rules.elementwise("select_n", [index, *cases], aval.shape, aval.dtype)
        deps = np.broadcast_to(index.deps, cases[0].deps.shape)
        for case in cases:
            deps = deps | case.deps
        return unknown(deps, aval.dtype)

    def _scan(self, eqn, values):
        params = eqn.params
        opened, split = self.open(params["jaxpr"]), _scan_split(params, len(values))
        if not any(value.depends for value in values):
            return [self._blank(var) for var in eqn.outvars]
        if opened is None or split is None or not 0 < params["length"] <= MAX_STEPS:
            return self._default(eqn, values)
        num_consts, num_carry = split
        consts, carry, xs = values[:num_consts], values[num_consts:][:num_carry], values[num_consts + num_carry :]
        length, rows = params["length"], []
        for step in reversed(range(length)) if params["reverse"] else range(length):
            row = [_row(x, step) for x in xs]
            out = self.run(*opened, [*consts, *carry, *row], [True] * len(opened[0].outvars))
            carry = out[:num_carry]
            rows.append(out[num_carry:])
        rows = rows[::-1] if params["reverse"] else rows
        stacked = [_rules.stack(ys, 0, ys[0].dtype) for ys in zip(*rows)]
        return [*carry, *stacked]

    def _while(self, eqn, values):
        params = eqn.params
        condition, body = self.open(params["cond_jaxpr"]), self.open(params["body_jaxpr"])
        if not any(value.depends for value in values):
            return [self._blank(var) for var in eqn.outvars]
        if condition is None or body is None:
            return self._default(eqn, values)
        first, second = params["cond_nconsts"], params["body_nconsts"]
        read_by_condition, read_by_body, state = values[:first], values[first:][:second], values[first + second :]
        for _ in range(MAX_STEPS):
            (goes_on,) = self.run(*condition, [*read_by_condition, *state], [True])
            if not goes_on.is_known:
                break
            if not goes_on.data:
                return state
            state = self.run(*body, [*read_by_body, *state], [True] * len(state))
        return self._default(eqn, values)

    # What is not known exactly.

    def _default(self, eqn, values):
        """Every output reads every operand, under the primitive's name."""
        reads = self.conservative(eqn.primitive.name, _rules.everything(values, self.words))
        return [_like(var, np.broadcast_to(reads, (*_shape(var), self.words))) for var in eqn.outvars]

    def _everything(self, eqn):
        """Outputs that may come from anywhere."""
        full = np.full(self.words, ~np.uint64(0))
        if self.num_bits % 64:
            full[-2] = (np.uint64(1) << np.uint64(self.num_bits % 64)) - np.uint64(1)
        full[-1] = 0
        self.outside.add(eqn.primitive.name)
        reads = self._marked(eqn.primitive.name, full)
        return [_like(var, np.broadcast_to(reads, (*_shape(var), self.words))) for var in eqn.outvars]

    def _blank(self, var):
        return _like(var, no_deps(_shape(var), self.words))

    def _read(self, env, var):
        return self._constant(var.val, var.aval) if isinstance(var, core.Literal) else env[var]

    def _constant(self, array, aval):
        if dtype_bounds(aval.dtype) is None and not jnp.issubdtype(aval.dtype, np.floating):
            return self.past(aval.shape, aval.dtype)  # complex numbers, keys
        return constant(np.asarray(array, aval.dtype), aval.dtype, self.words)


def _scan_split(params, number):
    """Numbers of constants and carried values of a scan; None if this version of JAX says it in another way."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    try:
        consts, carry, xs = (len(list(part)) for part in params["ft_in"].unpack())
    except (KeyError, AttributeError, TypeError, ValueError):
        return None
    return (consts, carry) if consts + carry + xs == number else None


def _row(value, step):
    return moved(value, lambda array: array[step])


def _like(var, deps):
    dtype = getattr(var.aval, "dtype", np.dtype(bool))
    return unknown(deps, dtype)


def _shape(var):
    return getattr(var.aval, "shape", ())


def _is_reference(var):
    return "Ref" in type(var.aval).__name__


def _reads_outside(eqn):
    return any(word in eqn.primitive.name for word in _OUTSIDE)
