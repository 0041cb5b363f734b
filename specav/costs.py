"""What a step costs: time of a target call by number of tokens, time of drafting by number of requests.

Serving engines run captured graphs of a few sizes and pad to the next one, so cost is a stair-step up to the largest
captured size and close to linear beyond. A `CostTable` says exactly that. It is a pytree of arrays: pass it through
jit, or close over it.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specav._checks import one_of, static_float, static_int

_TINY, _HUGE = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


class CostTable(NamedTuple):
    """Step times in seconds (any unit does, if it is the same everywhere). Make one with `cost_table`.

    Attributes:
      sizes: int32 [N], captured numbers of tokens, increasing.
      times: float32 [N], time of one target call of that size, > 0, non-decreasing.
      slope: float32 [], time per token beyond the largest size, >= 0.
      draft_sizes: int32 [M], numbers of drafting requests, increasing; None if drafting costs nothing.
      draft_times: float32 [M], time to draft for that many requests (all draft positions together), non-decreasing.
      draft_slope: float32 [], time per request beyond the largest, >= 0.
    """

    sizes: Int[Array, " N"]
    times: Float[Array, " N"]
    slope: Float[Array, ""]
    draft_sizes: Int[Array, " M"] | None = None
    draft_times: Float[Array, " M"] | None = None
    draft_slope: Float[Array, ""] | None = None


def cost_table(
    sizes: Any, times: Any, *, draft_sizes: Any = None, draft_times: Any = None, kind: str = "stair"
) -> CostTable:
    """Builds a table from measured times. On the host, once; not for use inside jit.

    Times are made non-decreasing by a running maximum: a larger step cannot cost less, measurement noise says so only.

    Args:
      sizes: ints [N], numbers of tokens, increasing and positive.
      times: numbers [N], time of one target call of that size, finite and > 0.
      draft_sizes, draft_times: the same for drafting, by number of drafting requests; both or neither.
      kind: "stair": a step of n tokens costs what the smallest size >= n costs (captured graphs, padding);
        "linear": costs are interpolated between sizes (engines that do not pad), as a table of every size between.

    Returns:
      A `CostTable`. Beyond the largest size costs are linear, with the slope of the last two entries (at least 0);
      with a single entry they are proportional to the size.

    Raises:
      TypeError: sizes are not integers.
      ValueError: empty, of different lengths, sizes not increasing and positive, times not finite and > 0.
    """
    one_of("kind", kind, ("stair", "linear"))
    if (draft_sizes is None) != (draft_times is None):
        raise ValueError("draft_sizes, draft_times: expected both or neither")
    target = _entries("sizes", sizes, "times", times, kind)
    draft = (None, None, None)
    if draft_sizes is not None:
        draft = _entries("draft_sizes", draft_sizes, "draft_times", draft_times, kind)
    return CostTable(*target, *draft)


def linear_costs(
    base: float, per_token: float, *, draft_base: float | None = None, draft_per_request: float | None = None
) -> CostTable:
    """A table with verify_cost(n) = base + per_token * n for n >= 1, and the same for drafting if given.

    Args:
      base, per_token: >= 0, their sum > 0.
      draft_base, draft_per_request: the same per drafting request; None counts as 0, both None as free drafting.

    Raises:
      TypeError, ValueError: not numbers, negative, or a step of one token that costs nothing.
    """
    target = _line("base", base, "per_token", per_token)
    if draft_base is None and draft_per_request is None:
        return CostTable(*target)
    return CostTable(*target, *_line("draft_base", draft_base or 0.0, "draft_per_request", draft_per_request or 0.0))


def flat_costs(time_per_step: float) -> CostTable:
    """A table in which every target call costs the same and drafting is free: then every draft is worth verifying.

    Args:
      time_per_step: seconds, or any unit; above 0.

    Raises:
      TypeError, ValueError: not a positive number.
    """
    return linear_costs(time_per_step, 0.0)


def verify_cost(table: CostTable, num_tokens: int | Int[Array, "*s"]) -> Float[Array, "*s"]:
    """Time of one target call over `num_tokens` tokens (0 counts as the smallest size).

    Args:
      table: a `CostTable`.
      num_tokens: int or int [...].

    Returns:
      float32 [...], non-decreasing in `num_tokens`.

    Raises:
      TypeError: not integers.
    """
    return _lookup(table.sizes, table.times, table.slope, "num_tokens", num_tokens)


def draft_cost(table: CostTable, num_requests: int | Int[Array, "*s"]) -> Float[Array, "*s"]:
    """Time to draft for `num_requests` requests; 0 for none, and if the table has no drafting times.

    Args:
      table: a `CostTable`.
      num_requests: int or int [...].

    Returns:
      float32 [...], non-decreasing in `num_requests`.

    Raises:
      TypeError: not integers.
    """
    requests = _integers("num_requests", num_requests)
    if table.draft_sizes is None or table.draft_times is None or table.draft_slope is None:
        return jnp.zeros(requests.shape, jnp.float32)
    cost = _lookup(table.draft_sizes, table.draft_times, table.draft_slope, "num_requests", requests)
    return jnp.where(requests > 0, cost, 0.0)


def measure(
    fn: Callable[..., Any],
    sizes: Sequence[int],
    *,
    prepare: Callable[[int], tuple[Any, ...]] | None = None,
    repeats: int = 10,
    warmup: int = 2,
    draft_fn: Callable[..., Any] | None = None,
    draft_sizes: Sequence[int] | None = None,
    draft_prepare: Callable[[int], tuple[Any, ...]] | None = None,
    kind: str = "stair",
    progress: Callable[[int, int], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> CostTable:
    """Times a jitted function of the user at several sizes and makes a table of it. Blocks the host; use it once.

    Protocol: first every size is called `warmup` times, unclocked, which compiles it. Then `repeats` rounds visit all
    sizes, forwards and backwards in turn, so that a slow drift of the machine (clocks, neighbours) touches all sizes
    alike. One timing is from the call until `jax.block_until_ready` of what it returns. An entry is the median of its
    timings, made non-decreasing over sizes.

    Args:
      fn: `fn(size)`, or `fn(*prepare(size))` if `prepare` is given. It must do the work of one target call over `size`
        tokens and return its outputs; only what is returned is waited for. Jit it, and keep compilation keyed by
        shapes: a function that compiles at every call measures the compiler.
      sizes: numbers of tokens, increasing and positive.
      prepare: makes the arguments. Called before every call, outside the clock, so that `fn` may donate its
        arguments; wrap it in functools.cache to reuse them. None: `fn` takes the size itself, a Python int.
      repeats: timings per size, at least 1; 10 give a stable median on a quiet machine.
      warmup: unclocked calls per size, at least 1. Two: the first compiles, the second settles allocations.
      draft_fn, draft_sizes, draft_prepare: the same for drafting by number of requests; optional.
      kind: as in `cost_table`.
      progress: called as progress(calls done, calls in all) after every call.
      clock: seconds; a test may bring its own.

    Returns:
      A `CostTable` in seconds.

    Raises:
      TypeError, ValueError: bad sizes or counts, `draft_fn` without `draft_sizes` or the reverse, or a timing of 0 (a
        clock too coarse for the function).
    """
    repeats = static_int("repeats", repeats, 1)
    warmup = static_int("warmup", warmup, 1)
    if (draft_fn is None) != (draft_sizes is None):
        raise ValueError("draft_fn, draft_sizes: expected both or neither")
    jobs = [(fn, prepare, int(size)) for size in _sizes("sizes", sizes)]
    num_target = len(jobs)
    if draft_fn is not None:
        jobs += [(draft_fn, draft_prepare, int(size)) for size in _sizes("draft_sizes", draft_sizes)]
    total = len(jobs) * (warmup + repeats)
    done = 0

    def call(job):
        nonlocal done
        function, make, size = job
        arguments = (size,) if make is None else jax.block_until_ready(tuple(make(size)))
        start = clock()
        jax.block_until_ready(function(*arguments))
        elapsed = clock() - start
        done += 1
        if progress is not None:
            progress(done, total)
        return elapsed

    for job in jobs:
        for _ in range(warmup):
            call(job)
    timings = np.empty((repeats, len(jobs)))
    for turn in range(repeats):
        order = range(len(jobs)) if turn % 2 == 0 else range(len(jobs) - 1, -1, -1)
        for index in order:
            timings[turn, index] = call(jobs[index])
    medians = np.median(timings, axis=0)
    drafting = {}
    if draft_fn is not None:
        drafting = {"draft_sizes": draft_sizes, "draft_times": medians[num_target:]}
    return cost_table(sizes, medians[:num_target], kind=kind, **drafting)


def _sizes(name, sizes):
    """Increasing positive integers as an int64 array."""
    array = np.asarray(sizes)
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{name}: expected integers, got {array.dtype}")
    if array.ndim != 1 or not array.size:
        raise ValueError(f"{name}: expected shape [N] with N >= 1, got {list(array.shape)}")
    array = array.astype(np.int64)
    if array[0] < 1 or np.any(np.diff(array) <= 0) or array[-1] >= 2**31:
        raise ValueError(f"{name}: expected increasing ints from 1 to 2^31 - 1, got {array.tolist()}")
    return array


def _entries(sizes_name, sizes, times_name, times, kind):
    """Checked and monotone (sizes, times, slope) as device arrays."""
    sizes = _sizes(sizes_name, sizes)
    times = np.asarray(times, dtype=np.float64)
    if times.shape != sizes.shape:
        raise ValueError(f"{times_name}: expected one per size, shape [{len(sizes)}], got {list(times.shape)}")
    # As float32 stores them; devices may flush what is below its normal range to 0. False for NaN.
    if not np.all((times >= _TINY) & (times <= _HUGE)):
        raise ValueError(f"{times_name}: expected finite numbers > 0, got {times.tolist()}")
    times = np.maximum.accumulate(times)
    if len(sizes) == 1:
        slope = times[0] / sizes[0]
    else:
        # Not from the float32 entries: their difference may have lost every digit.
        slope = (times[-1] - times[-2]) / (sizes[-1] - sizes[-2])
    if kind == "linear":
        between = np.arange(sizes[0], sizes[-1] + 1)
        sizes, times = between, np.interp(between, sizes, times)
    return _arrays(sizes, times, slope)


def _line(base_name, base, slope_name, slope):
    """(sizes, times, slope) of base + slope * n: one entry at 1 and the slope beyond."""
    base = static_float(base_name, base, 0.0)
    slope = static_float(slope_name, slope, 0.0)
    if not _TINY <= base + slope <= _HUGE:
        raise ValueError(f"{base_name}, {slope_name}: expected a finite sum > 0, got {base} and {slope}")
    return _arrays(np.array([1]), np.array([base + slope]), slope)


def _arrays(sizes, times, slope):
    return jnp.asarray(sizes, jnp.int32), jnp.asarray(times, jnp.float32), jnp.asarray(slope, jnp.float32)


def _integers(name, value):
    array = jnp.asarray(value)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name}: expected an int or an integer array, got {array.dtype}")
    return array.astype(jnp.int32)


def _lookup(sizes, times, slope, name, numbers):
    """Time of the smallest size >= n, and `slope` for everything beyond the largest."""
    numbers = _integers(name, numbers)
    # Unrolled: a few gathers that fuse, no device loop.
    index = jnp.searchsorted(sizes, numbers, side="left", method="scan_unrolled")
    beyond = jnp.maximum(numbers - sizes[-1], 0).astype(jnp.float32)
    return times[jnp.minimum(index, sizes.shape[0] - 1)] + slope * beyond
