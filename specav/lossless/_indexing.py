"""Dependence rules of primitives that address elements by index: exact for known indices, conservative for others."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import GatherScatterMode

from specav.lossless._abstract import Value, joined, picked, union, unknown

SCATTERS = {
    "scatter", "scatter-add", "scatter_add", "scatter-mul", "scatter_mul", "scatter-min", "scatter_min", "scatter-max",
    "scatter_max", "scatter-sub", "scatter_sub",
}  # fmt: skip


def gather(operand: Value, indices: Value, params: dict, dtype: Any) -> tuple[Value, bool]:
    """Gathered elements, and whether their origin is exact.

    Unknown indices may point anywhere along the axes that they address (not along batch axes), and are read as well.
    """
    options = {
        "dimension_numbers": params["dimension_numbers"],
        "slice_sizes": params["slice_sizes"],
        "mode": GatherScatterMode.FILL_OR_DROP,
        "fill_value": -1,
    }
    numbers = jnp.asarray(np.arange(int(np.prod(operand.shape)), dtype=np.int32).reshape(operand.shape))
    mode = GatherScatterMode.from_any(params["mode"])
    if indices.is_known:
        if mode == GatherScatterMode.CLIP:
            options["mode"] = mode
        ids = np.asarray(jax.lax.gather(numbers, jnp.asarray(indices.data), **options))
        if mode == GatherScatterMode.FILL_OR_DROP or not (ids < 0).any():
            return picked([operand], ids, dtype), True
    zeros = jnp.zeros(indices.shape, indices.dtype)
    ids = np.asarray(jax.lax.gather(numbers, zeros, **options))
    addressed = tuple(params["dimension_numbers"].start_index_map)
    spread = np.bitwise_or.reduce(operand.deps, addressed, keepdims=True)
    spread = np.broadcast_to(spread, operand.deps.shape)
    deps = picked([unknown(spread, operand.dtype)], ids, dtype).deps
    offsets = params["dimension_numbers"].offset_dims
    batch = [axis for axis in range(ids.ndim) if axis not in offsets]
    read = np.bitwise_or.reduce(indices.deps, -2)  # one index vector per batch element
    shape = [ids.shape[axis] if axis in batch else 1 for axis in range(ids.ndim)]
    deps = deps | read.reshape((*shape, deps.shape[-1]))
    return unknown(deps, dtype), not (indices.depends or operand.depends)


def dynamic_slice(operand: Value, starts: Sequence[Value], params: dict) -> tuple[Value, bool]:
    """A slice at known or unknown starts, and whether its origin is exact."""
    sizes, deps, exact, first = params["slice_sizes"], operand.deps, True, []
    for axis, (start, size, whole) in enumerate(zip(starts, sizes, operand.shape)):
        if start.is_known or size == whole:  # starts are clamped into the array
            wanted = 0 if size == whole else int(np.asarray(start.data))
            first.append(min(max(wanted, 0), whole - size))
            continue
        line = np.bitwise_or.reduce(deps, axis, keepdims=True)
        deps = np.broadcast_to(line, deps.shape) | start.deps
        first.append(0)
        exact = False
    index = tuple(slice(begin, begin + size) for begin, size in zip(first, sizes))
    if exact:
        numbers = np.arange(int(np.prod(operand.shape))).reshape(operand.shape)
        return picked([operand], numbers[index], operand.dtype), True
    return unknown(deps[index], operand.dtype), not deps.any()


def dynamic_update_slice(operand: Value, update: Value, starts: Sequence[Value]) -> tuple[Value, bool]:
    """An array with a slice replaced, and whether it is exact."""
    if all(start.is_known for start in starts):
        size = int(np.prod(operand.shape))
        numbers = np.arange(size).reshape(operand.shape)
        fresh = size + np.arange(int(np.prod(update.shape))).reshape(update.shape)
        first = [
            min(max(int(np.asarray(start.data)), 0), whole - part)
            for start, whole, part in zip(starts, operand.shape, update.shape)
        ]
        numbers[tuple(slice(begin, begin + part) for begin, part in zip(first, update.shape))] = fresh
        return picked([operand, update], numbers, operand.dtype), True
    written = union(update.deps)
    for start in starts:
        written = written | start.deps
    return unknown(operand.deps | written, operand.dtype), not written.any()


def scatter(name: str, operand: Value, indices: Value, updates: Value, params: dict) -> tuple[Value, bool]:
    """An array with elements replaced or combined, and whether it is exact: known indices, each hit at most once."""
    everything = union(indices.deps) | union(updates.deps)
    conservative = unknown(operand.deps | everything, operand.dtype), not everything.any()
    if not indices.is_known:
        return conservative
    mode = GatherScatterMode.from_any(params["mode"])
    options = {
        "dimension_numbers": params["dimension_numbers"],
        "mode": mode if mode == GatherScatterMode.CLIP else GatherScatterMode.FILL_OR_DROP,
    }
    at, size = jnp.asarray(indices.data), int(np.prod(operand.shape))
    ones = jnp.ones(updates.shape, jnp.int32)
    hits = np.asarray(jax.lax.scatter_add(jnp.zeros(operand.shape, jnp.int32), at, ones, **options))
    dropped = hits.sum() < ones.size
    if hits.max(initial=0) > 1 or (dropped and mode == GatherScatterMode.PROMISE_IN_BOUNDS):
        return conservative
    fresh = jnp.asarray((size + np.arange(ones.size, dtype=np.int32)).reshape(updates.shape))
    numbers = jnp.asarray(np.arange(size, dtype=np.int32).reshape(operand.shape))
    ids = np.asarray(jax.lax.scatter(numbers, at, fresh, **options))
    replaced = picked([operand, updates], ids, operand.dtype)
    if name == "scatter" and _overwrites(params.get("update_jaxpr")):
        return replaced, True
    # Combined with what was there: both are read.
    return unknown(joined([replaced.deps, operand.deps], operand.shape), operand.dtype), True


def _overwrites(update_jaxpr):
    if update_jaxpr is None:
        return True
    jaxpr = getattr(update_jaxpr, "jaxpr", update_jaxpr)
    return not jaxpr.eqns and len(jaxpr.invars) == 2 and jaxpr.outvars[0] is jaxpr.invars[1]
