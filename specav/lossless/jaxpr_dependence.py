"""Static dependence analysis: which elements of its inputs a traced function can depend on, element by element.

A function is traced to a jaxpr and run on dependence sets. The result is an upper bound that holds for *all* inputs:
an element that is not listed cannot change the output, NaN and infinities included (0 * x reads x, for floats). It is
exact through elementwise operations, slicing, concatenation, broadcasting, cumulative operations, reductions,
`dot_general`, indexing by known numbers, `where` by known masks and loops of a known length up to 64 steps. `sort`,
`top_k`, `while`, `cond`, longer scans, indexing by unknown numbers and primitives without a rule are over-estimated,
and every set that passed through one says so by its name.

Counts get one more idea. A policy returns how many drafts to verify, and what matters is the event {count >= i}, not
the number. If a mask goes from true to false once along a row (a cumulative product or minimum), then
{sum of mask >= i} is element i of the mask; such events are followed through minima, selections, shifts, comparisons.

Callbacks, foreign calls and mutable arrays are taken to read everything. The trace stands for the function at the
shapes given: what is no pure function of its arguments, or branches in Python on its shapes, is not covered.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specav._checks import static_int
from specav.features import FEATURES, DraftFeatures
from specav.lossless._abstract import event
from specav.lossless._interpreter import Interpreter
from specav.policies import Policy, PolicyInputs

# Inputs that say something about this round's drafts, all [B, K]. Everything else is known from earlier rounds.
SLOT_INPUTS = (*FEATURES, "acceptance", "survival", "draft_tokens")


class ElementReads(NamedTuple):
    """What each element of one output may depend on.

    Attributes:
      inputs: the tuple of example arguments with every leaf replaced by bool [*output, *leaf].
      conservative: names of the primitives through which these sets were over-estimated.
    """

    inputs: Any
    conservative: tuple[str, ...]


class Dependence(NamedTuple):
    """What the decisions of a policy may depend on, of this round's inputs.

    Attributes:
      reads: by name of the input (a name of `FEATURES`, "acceptance", "survival", "draft_tokens"; those that are never
        read are left out), bool [B, K, B, K]: whether draft i of request r is verified ([r, i], counted from 0) may
        depend on the input's element [s, j].
      through: by name of a primitive that was treated conservatively, bool [B, K], the decisions that it affects.
    """

    reads: dict[str, np.ndarray]
    through: dict[str, np.ndarray]

    @property
    def conservative(self) -> tuple[str, ...]:
        """Names of the primitives through which some decision went conservatively."""
        return tuple(self.through)

    def explain(self, request: int, position: int) -> str:
        """In words, what decides whether draft `position` (from 1) of `request` (from 0) is verified.

        Raises:
          IndexError: no such slot.
        """
        parts = []
        for name, reads in self.reads.items():
            here = reads[request, position - 1]
            if own := np.flatnonzero(here[request]).tolist():
                parts.append(f"{name} of {_drafts(own)}")
            others = np.delete(here, request, axis=0)
            if others.any():
                parts.append(f"{name} of {int(others.sum())} drafts of {int(others.any(axis=1).sum())} other requests")
        head = f"whether draft {position} of request {request} is verified depends on "
        text = head + (", ".join(parts) if parts else "earlier rounds only")
        names = [name for name, affected in self.through.items() if affected[request, position - 1]]
        return text + (f" (at most: not followed through {', '.join(names)})" if names else "")


def input_dependence(function: Callable[..., Any], *example_args: Any) -> Any:
    """Which input elements each output element of a function can depend on.

    Args:
      function: traceable by JAX, pure.
      *example_args: pytrees of arrays or `jax.ShapeDtypeStruct`; only shapes and dtypes count.

    Returns:
      The pytree of the function's result, with an `ElementReads` in place of every array.
    """
    leaves, structure = jax.tree.flatten(example_args)
    leaves = [_shape_of(leaf) for leaf in leaves]
    traced, results = jax.make_jaxpr(function, return_shape=True)(*jax.tree.unflatten(structure, leaves))
    interpreter, outputs, starts = _analysed(traced, leaves, [True] * len(leaves), [True] * len(traced.jaxpr.outvars))

    def reads(value):
        bits = _unpacked(value.deps, interpreter.num_bits)
        parts = [
            bits[..., start : start + int(np.prod(leaf.shape))].reshape(*value.shape, *leaf.shape)
            for leaf, start in zip(leaves, starts)
        ]
        names = _reasons(interpreter, value.deps)
        return ElementReads(jax.tree.unflatten(structure, parts), tuple(n for n, where in names.items() if where.any()))

    return jax.tree.unflatten(jax.tree.structure(results), [reads(value) for value in outputs])


def dependence(policy: Policy, *, num_requests: int = 64, num_draft_tokens: int = 8, state: Any = None) -> Dependence:
    """What a policy's decisions may depend on, from its code (`Policy.decide`), whatever it declares.

    All fields of `PolicyInputs` are given. num_drafts, active, the counts, last_accepted, last_tested and the state are
    known from earlier rounds: they are not listed, and no value of them is assumed. `survival` is taken to be what
    `survival_probabilities` returns: it never increases along a request.

    Args:
      policy: traced at these shapes.
      num_requests, num_draft_tokens: B, K.
      state: state to trace with; only shapes and dtypes count. Default: `policy.init()`.

    Returns:
      A `Dependence`.

    Raises:
      TypeError, ValueError: bad sizes, a decision that is not int [B], or what the policy raises when traced.
    """
    rows, width = _sizes(num_requests, num_draft_tokens)

    def decide(state, inputs):
        return policy.decide(state, inputs)[0]

    traced, ((values, layout),) = _policy_values(decide, policy, rows, width, state)
    count = values[0]
    if count.shape != (rows,) or not jnp.issubdtype(count.dtype, jnp.integer):
        raise TypeError(
            f"policy {policy.name!r}: expected num_verified int [{rows}], got {count.dtype} {list(count.shape)}"
        )
    events = np.stack([event(count, i) for i in range(1, width + 1)], axis=1)
    return _named(traced, layout, events, (rows, width))


def admission_dependence(
    policy: Policy, *, num_requests: int = 64, num_draft_tokens: int = 8, state: Any = None
) -> tuple[Dependence, Dependence]:
    """What the scores of a policy's `admission` may depend on, slot by slot, and its budget.

    Args:
      policy: with an `admission`; the other arguments are those of `dependence`.

    Returns:
      Two `Dependence`: of scores, [r, i] for slot i of request r; of the budget, the same for every slot.

    Raises:
      TypeError, ValueError: no admission, or scores and budget of wrong shapes.
    """
    rows, width = _sizes(num_requests, num_draft_tokens)
    admission = policy.admission
    if admission is None:
        raise ValueError(f"policy {policy.name!r} has no admission")

    def admit(state, inputs):
        found = admission(state, inputs)[0]
        return found.scores, found.budget

    traced, ((values, layout),) = _policy_values(admit, policy, rows, width, state)
    scores, budget = values
    if scores.shape != (rows, width) or budget.shape != ():
        raise ValueError(
            f"policy {policy.name!r}: expected an admission of scores [{rows}, {width}] and a budget [], "
            f"got {list(scores.shape)} and {list(budget.shape)}"
        )
    everywhere = np.broadcast_to(budget.deps, scores.deps.shape)
    return tuple(_named(traced, layout, deps, (rows, width)) for deps in (scores.deps, everywhere))  # type: ignore


def example_inputs(num_requests: int, num_draft_tokens: int) -> PolicyInputs:
    """`PolicyInputs` with every field given, as shapes."""

    def shaped(dtype, *shape) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    slots = (num_requests, num_draft_tokens)
    return PolicyInputs(
        features=DraftFeatures(**{name: shaped(jnp.float32, *slots) for name in DraftFeatures._fields}),
        draft_tokens=shaped(jnp.int32, *slots),
        num_drafts=shaped(jnp.int32, num_requests),
        acceptance=shaped(jnp.float32, *slots),
        survival=shaped(jnp.float32, *slots),
        active=shaped(jnp.bool_, num_requests),
        num_base_tokens=shaped(jnp.int32),
        num_sampling=shaped(jnp.int32),
        num_drafting=shaped(jnp.int32),
        last_accepted=shaped(jnp.int32, num_requests),
        last_tested=shaped(jnp.int32, num_requests),
    )


def example_state(policy: Policy, state: Any = None) -> Any:
    """The policy's state, given or initial, as shapes."""
    return jax.tree.map(_shape_of, policy.init() if state is None else state)


def _sizes(num_requests, num_draft_tokens):
    return static_int("num_requests", num_requests, 1), static_int("num_draft_tokens", num_draft_tokens, 1)


def _policy_values(function, policy, rows, width, state):
    """The outputs of a function of (state, PolicyInputs), and the names of its tracked inputs in the order of bits."""
    args = (example_state(policy, state), example_inputs(rows, width))
    traced = jax.make_jaxpr(function)(*args)
    paths = jax.tree_util.tree_flatten_with_path(args)[0]
    names = [getattr(path[-1], "name", "") if path[0].idx == 1 else "" for path, _ in paths]
    read = {id(var) for eqn in traced.jaxpr.eqns for var in eqn.invars} | {id(var) for var in traced.jaxpr.outvars}
    tracked = [name in SLOT_INPUTS and id(var) in read for name, var in zip(names, traced.jaxpr.invars)]
    falling = [name == "survival" for name in names]
    leaves = [leaf for _, leaf in paths]
    interpreter, values, _ = _analysed(traced, leaves, tracked, [True] * len(traced.jaxpr.outvars), falling)
    return interpreter, ((values, [name for name, yes in zip(names, tracked) if yes]),)


def _analysed(traced, leaves, tracked, needed, falling=None):
    """Runs a closed jaxpr abstractly; also returns the first bit of every input."""
    sizes = [int(np.prod(leaf.shape)) if yes else 0 for leaf, yes in zip(leaves, tracked)]
    starts = np.cumsum([0, *sizes])
    interpreter = Interpreter(int(starts[-1]))
    args = []
    for number, (leaf, yes) in enumerate(zip(leaves, tracked)):
        dtype = traced.jaxpr.invars[number].aval.dtype
        value = (
            interpreter.tracked(leaf.shape, dtype, int(starts[number])) if yes else interpreter.past(leaf.shape, dtype)
        )
        if falling is not None and falling[number]:
            value = value._replace(trends=frozenset({(1, -1)}))
        args.append(value)
    opened = interpreter.open(traced)
    if opened is None:
        raise TypeError("the function closes over mutable arrays")
    return interpreter, interpreter.run(*opened, args, needed), starts[:-1]


def _named(interpreter, layout, deps, slots):
    """A `Dependence` from sets [B, K, W]."""
    bits = _unpacked(deps, interpreter.num_bits).reshape(*slots, len(layout), *slots)
    through = {name: where for name, where in _reasons(interpreter, deps).items() if where.any()}
    reads = {name: bits[:, :, number] for number, name in enumerate(layout)}
    for name in interpreter.outside & through.keys():  # it may know inputs that the program does not read
        known = through[name][:, :, None, None]
        reads = {name: reads.get(name, False) | np.broadcast_to(known, (*slots, *slots)) for name in SLOT_INPUTS}
    return Dependence({name: where for name, where in reads.items() if where.any()}, through)


def _unpacked(deps, num_bits):
    """Bits as bool [..., num_bits]."""
    as_bytes = np.ascontiguousarray(deps[..., :-1]).astype("<u8").view(np.uint8)
    return np.unpackbits(as_bytes, axis=-1, count=num_bits, bitorder="little").astype(bool)


def _reasons(interpreter, deps):
    """Names of conservative primitives, and where they had a part."""
    mark = np.asarray(deps[..., -1])
    return {name: (mark >> np.uint64(bit)) & np.uint64(1) == 1 for name, bit in interpreter.reason_bits().items()}


def _shape_of(leaf):
    return (
        jax.ShapeDtypeStruct(np.shape(leaf), jnp.result_type(leaf))
        if not hasattr(leaf, "dtype")
        else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    )


def _drafts(positions):
    """Positions counted from 0 in words: draft 2, drafts 1-3, 5."""
    runs: list[list[int]] = []
    for position in positions:
        if runs and position == runs[-1][1] + 1:
            runs[-1][1] = position
        else:
            runs.append([position, position])
    words = [str(a + 1) if a == b else f"{a + 1}-{b + 1}" for a, b in runs]
    return f"draft{'s' if len(positions) > 1 else ''} {', '.join(words)}"
