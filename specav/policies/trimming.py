"""Policies that spend one budget on a whole batch: the trimmer, its live forms, and a constant capacity."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from specav._checks import one_of, shaped, static_int
from specav.costs import CostTable
from specav.policies.base import Admission, Policy, by_admission, by_slots, read_input, usable_drafts
from specav.policies.stopping import drawn_confidence
from specav.trimmer import allocate_slots, choose_budget

_EVERYTHING = 2**31 - 1


class TrimmerState(NamedTuple):
    """State of `trimmer`.

    Attributes:
      budget: int32 [], drafts to verify in the next round, over the whole batch.
    """

    budget: Int[Array, ""]


def trimmer(
    costs: CostTable,
    *,
    initial_budget: int | None = None,
    axis_name: str | tuple[str, ...] | None = None,
    method: str = "sort",
) -> Policy:
    """The trimmer: the budget chosen from the *previous* round's survival, spent on this round's best slots.

    n = allocate_budget(S_t, B_t, K_r) with B_t = choose_budget(S_{t-1}, ...). The budget is known before anything is
    drawn, and top-B admits slots in one order in which each is decided from what earlier ones revealed: a decision
    depends on the estimator's class at positions <= i, and the joint law of the batch is exact where every request's
    own is. One round of lag also takes the choice off the critical path. This is how vLLM's adaptive verification does
    it; the objective is that of DSpark and TurboSpec, see `choose_budget`.

    With `axis_name` the batch is sharded over devices: call it inside shard_map (or a vmap with that axis name) on the
    local rows. Survival and counts are gathered as integers, every device computes the same budget and allocation, and
    takes its own rows. inputs.num_base_tokens, num_sampling and num_drafting are then of the local rows, and summed.

    Args:
      costs: times of steps by tokens, of the whole batch.
      initial_budget: drafts verified in the first round, over the whole batch. Default: all.
      axis_name: mapped axis or axes over which the batch is sharded.
      method: of `allocate_slots`; "pairwise" can be proved causal by a dependence analysis, at a quadratic cost.

    Raises:
      TypeError, ValueError: a bad budget or method.
    """
    budget = _EVERYTHING if initial_budget is None else static_int("initial_budget", initial_budget, 0)
    one_of("method", method, ("sort", "pairwise"))

    def init():
        return TrimmerState(jnp.asarray(budget, jnp.int32))

    def admission(state, inputs):
        survival, num_drafts, counts, _ = _whole_batch("trimmer", inputs, axis_name)
        return Admission(survival, state.budget), TrimmerState(choose_budget(survival, num_drafts, costs, **counts))

    if axis_name is None:
        return by_admission("trimmer", admission, init=init, method=method, window="causal", reads=("survival",))

    def slots(state, inputs):
        _, num_drafts, _, own_rows = _whole_batch("trimmer", inputs, axis_name)
        (survival, budget), state = admission(state, inputs)
        return own_rows(allocate_slots(survival, budget, num_drafts, method=method)), state

    return by_slots("trimmer", slots, init=init, reads=("survival",), couples="sequential", window="causal")


def live_argmax(costs: CostTable, *, axis_name: str | tuple[str, ...] | None = None, method: str = "sort") -> Policy:
    """The trimmer with the budget of this very round: n = allocate_budget(S_t, choose_budget(S_t, ...), K_r).

    The argmax looks at every position of the block, so only the deferred rule keeps it lossless (and parallel drafters
    under prefix features). For research and comparison; arguments as in `trimmer`.
    """
    return _live("live_argmax", "argmax", costs, axis_name, method, couples="live", window="block")


def early_stop(costs: CostTable, *, axis_name: str | tuple[str, ...] | None = None, method: str = "sort") -> Policy:
    """Admits slots of this round by survival, until the next one would not raise tokens per second.

    Unlike the argmax, the search reads no slot behind the first that is left out, so that it decides in one order from
    what is revealed: a decision depends on the estimator's class at positions <= i, and the joint law of the batch is
    exact where every request's own is. A local maximum; arguments as in `trimmer`.

    References:
      DSpark, algorithm 1.
    """
    return _live("early_stop", "early_stop", costs, axis_name, method, couples="sequential", window="causal")


def tetris(capacity: int, *, method: str = "sort") -> Policy:
    """TETRIS: the `capacity` drafts of the batch with the highest q_1(x_1) ... q_i(x_i).

    A constant budget, spent on the confidence of the drawn tokens: lossless under the coupled and the deferred rule.

    Args:
      capacity: drafts verified per round over the whole batch, at least 0.
      method: of `allocate_slots`.

    Raises:
      TypeError, ValueError: a bad capacity or method.

    References:
      Wu et al., TETRIS: Optimal Draft Token Selection for Batch Speculative Decoding, 2025.
    """
    capacity = static_int("capacity", capacity, 0)
    one_of("method", method, ("sort", "pairwise"))
    name = f"tetris({capacity})"

    def admission(state, inputs):
        return Admission(drawn_confidence(name, inputs), jnp.asarray(capacity, jnp.int32)), state

    return by_admission(name, admission, method=method, window="causal", reads=("logit_q_sampled",))


def _live(name, search, costs, axis_name, method, *, couples, window):
    """Policies whose budget is chosen from this round's survival."""
    one_of("method", method, ("sort", "pairwise"))

    def slots(state, inputs):
        survival, num_drafts, counts, own_rows = _whole_batch(name, inputs, axis_name)
        budget = choose_budget(survival, num_drafts, costs, search=search, **counts)
        return own_rows(allocate_slots(survival, budget, num_drafts, method=method)), state

    return by_slots(name, slots, reads=("survival",), couples=couples, window=window)


def _whole_batch(policy_name, inputs, axis_name):
    """Survival, drafts and counts of the whole batch, and a function that takes this device's rows of a result."""
    num_drafts = usable_drafts(inputs)
    survival = read_input(policy_name, inputs, "survival").astype(jnp.float32)
    rows = num_drafts.shape[0]
    active = jnp.asarray(rows, jnp.int32) if inputs.active is None else jnp.sum(inputs.active, dtype=jnp.int32)
    given = {
        "num_base_tokens": (inputs.num_base_tokens, active),
        "num_sampling": (inputs.num_sampling, active),
        "num_drafting": (inputs.num_drafting, jnp.sum(num_drafts > 0, dtype=jnp.int32)),
    }
    counts: dict[str, Any] = {
        name: default if value is None else shaped({}, f"inputs.{name}", value, "", "int").astype(jnp.int32)
        for name, (value, default) in given.items()
    }
    if axis_name is None:
        return survival, num_drafts, counts, lambda mask: mask
    size, index = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)

    def gather(local):
        # A sum of one term and zeros, in integers: exact, and known to be the same on every device, so that the
        # budget may be carried through loops (an all_gather's result counts as device-dependent there).
        here = jnp.arange(size).reshape((size,) + (1,) * local.ndim) == index
        padded = jnp.where(here, local[None], jnp.zeros_like(local)[None])
        return jax.lax.psum(padded, axis_name).reshape((size * rows, *local.shape[1:]))

    bits = gather(jax.lax.bitcast_convert_type(survival, jnp.int32))
    counts = {name: jax.lax.psum(value, axis_name) for name, value in counts.items()}
    own_rows = lambda mask: jax.lax.dynamic_slice_in_dim(mask, index * rows, rows, axis=0)  # noqa: E731
    return jax.lax.bitcast_convert_type(bits, jnp.float32), gather(num_drafts), counts, own_rows
