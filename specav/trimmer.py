"""The trimmer: how many drafts are worth verifying in this step, and which ones.

`choose_budget` weighs expected tokens against step time, `allocate_budget` spends a budget on the best slots. Both are
a sort and a few elementwise operations on the device: static shapes, no host synchronisation, and integers that are
identical wherever the inputs are.

What an allocation may look at decides whether decoding stays lossless. Whether slot i of a request is verified reads
the survival of that request up to i, never beyond: later slots rank behind earlier ones by construction. The budget is
a number that the caller brings; `choose_budget` of the *current* round's survival looks at later positions, so feed
it forward to the next round (`specav.policies.trimmer`).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specav._checks import one_of, shaped
from specav.costs import CostTable, draft_cost, verify_cost
from specav.survival import valid_slots


def choose_budget(
    survival: Float[Array, "B K"],
    num_drafts: Int[Array, " B"],
    costs: CostTable,
    num_base_tokens: int | Int[Array, ""],
    num_sampling: int | Int[Array, ""],
    *,
    num_drafting: int | Int[Array, ""] | None = None,
    search: str = "argmax",
) -> Int[Array, ""]:
    """The number of drafts to verify that maximises expected tokens per second of the step.

    B* = argmax_B [num_sampling + sum of the B best S] / [draft_cost(R) + verify_cost(num_base_tokens + B)], over
    B = 0 .. sum of num_drafts. Ties go to the smallest B. Sums and quotients are float32: values of the objective
    that differ by less than about 1e-6 of themselves may count as ties.

    With search="early_stop", B* is instead the first B that the next slot does not improve. That is a local maximum,
    but it reads no slot behind the next one, which is what makes a budget of the current round admissible
    (`specav.policies.early_stop`).

    Args:
      survival: float [B, K], non-increasing along K (`survival_probabilities`); clipped to [0, 1], NaN counts as 0.
      num_drafts: int [B], clamped to [0, K]; slots beyond never count.
      costs: a `CostTable`.
      num_base_tokens: int [], T, tokens of the step that are not drafts (last tokens, prefill), clamped to >= 0.
      num_sampling: int [], requests that emit a token in this step whatever is verified, clamped to >= 0.
      num_drafting: int [], R, requests that pay for drafting. Default: those with num_drafts > 0. Under the deferred
        rule give the number of requests with *new* drafts.
      search: "argmax" or "early_stop".

    Returns:
      int32 [], 0 .. sum of num_drafts.

    Raises:
      TypeError, ValueError: wrong dtypes or shapes.

    References:
      The goodput objective of DSpark (algorithm 1, whose search is the early stop) and TurboSpec (Liu et al., 2024),
      over a table of step times.
      Under the deferred rule it is myopic: a slot left out is tested later, not lost.
    """
    dims: dict[str, Any] = {}
    one_of("search", search, ("argmax", "early_stop"))
    survival = shaped(dims, "survival", survival, "B K", "float").astype(jnp.float32)
    num_drafts = shaped(dims, "num_drafts", num_drafts, "B", "int").astype(jnp.int32)
    base = jnp.maximum(shaped({}, "num_base_tokens", num_base_tokens, "", "int").astype(jnp.int32), 0)
    sampling = jnp.maximum(shaped({}, "num_sampling", num_sampling, "", "int").astype(jnp.int32), 0)
    if num_drafting is None:
        num_drafting = jnp.sum(num_drafts > 0, dtype=jnp.int32)
    drafting = shaped({}, "num_drafting", num_drafting, "", "int").astype(jnp.int32)

    valid = valid_slots(num_drafts, dims["K"])
    value = jnp.where(valid & (survival > 0), jnp.minimum(survival, 1.0), 0.0)
    best = -jnp.sort(-value.reshape(-1))
    gain = jnp.concatenate([jnp.zeros((1,), jnp.float32), jnp.cumsum(best)])
    budgets = jnp.arange(gain.shape[0], dtype=jnp.int32)
    rate = (sampling.astype(jnp.float32) + gain) / (draft_cost(costs, drafting) + verify_cost(costs, base + budgets))
    rate = jnp.where(budgets <= jnp.sum(valid, dtype=jnp.int32), rate, -jnp.inf)
    if search == "early_stop":
        following = jnp.concatenate([rate[1:], jnp.full((1,), -jnp.inf)])
        return jnp.argmax(following <= rate).astype(jnp.int32)  # the first that is not improved
    return jnp.argmax(rate).astype(jnp.int32)  # the first maximum


def allocate_budget(
    survival: Float[Array, "B K"],
    budget: int | Int[Array, ""],
    num_drafts: Int[Array, " B"],
    *,
    method: str = "sort",
) -> Int[Array, " B"]:
    """Spends a budget on the slots with the highest survival; every request gets a prefix of its drafts.

    Slots are taken in the order (-survival, position, request). Comparisons are exact, on the bits of the floats.

    Args:
      survival: float [B, K]; NaN ranks last. A running minimum along K is taken first, so that a request's slots are
        in order whatever is given; survival, or any other score that never increases along a request, is unchanged.
      budget: int [], clamped to [0, sum of num_drafts].
      num_drafts: int [B], clamped to [0, K]; slots beyond never count.
      method: "sort", or "pairwise": the same integers by counting comparisons, see `allocate_slots`.

    Returns:
      num_verified, int32 [B], 0 .. num_drafts, of sum min(max(budget, 0), sum of num_drafts).

    Raises:
      TypeError, ValueError: wrong dtypes, shapes or method.

    References:
      DSpark and TETRIS (Wu et al., 2025) rank draft slots of a batch by the product of their acceptance probabilities.
    """
    return count_prefix(allocate_slots(survival, budget, num_drafts, method=method))


def allocate_slots(
    survival: Float[Array, "B K"],
    budget: int | Int[Array, ""],
    num_drafts: Int[Array, " B"],
    *,
    method: str = "sort",
) -> Bool[Array, "B K"]:
    """Slot by slot, what `allocate_budget` counts: a mask that is a prefix of every row.

    "sort" finds the last slot that is taken and compares all others with it: O(BK log BK). "pairwise" ranks each slot
    by counting the slots before it, O((BK)^2), and shows on its face what a decision reads: within a request the
    order is constant (earlier positions come first), so that slot i of a request enters comparisons with its own
    survival and those of *other* requests only. A dependence analysis that follows elementwise operations and
    selections by constant masks can prove from it that nothing beyond position i of its own request is read.

    Args, Raises: as `allocate_budget`.

    Returns:
      bool [B, K].
    """
    dims: dict[str, Any] = {}
    one_of("method", method, ("sort", "pairwise"))
    survival = shaped(dims, "survival", survival, "B K", "float")
    budget = shaped({}, "budget", budget, "", "int").astype(jnp.int32)
    num_drafts = shaped(dims, "num_drafts", num_drafts, "B", "int").astype(jnp.int32)
    valid = valid_slots(num_drafts, dims["K"])
    order = jax.lax.cummin(_ordered_bits(survival), axis=1)
    pick = _taken_by_sorting if method == "sort" else _taken_by_counting
    return pick(order, jnp.clip(budget, 0, jnp.sum(valid, dtype=jnp.int32)), valid)


def count_prefix(slots: Bool[Array, "B K"]) -> Int[Array, " B"]:
    """How many leading slots of each row are set: the num_verified of a mask.

    num_verified >= i exactly if slots 1..i are all set, so that it depends on nothing beyond position i if the mask
    does not.

    Args:
      slots: bool [B, K].

    Returns:
      int32 [B].

    Raises:
      TypeError, ValueError: wrong dtype or shape.
    """
    slots = shaped({}, "slots", slots, "B K", "bool")
    return jnp.sum(jax.lax.cummin(slots.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


def _taken_by_sorting(order, budget, valid):
    """Sorts all slots, then takes those up to and including the budget-th."""
    batch, width = order.shape
    # Position-major numbering: a stable order by it is the order by (position, request).
    number = jnp.arange(width, dtype=jnp.int32)[None, :] * batch + jnp.arange(batch, dtype=jnp.int32)[:, None]
    rank = jnp.where(valid, ~order, jnp.iinfo(order.dtype).max)  # ~ reverses the order and cannot overflow
    ranks, numbers = jax.lax.sort((rank.reshape(-1), number.reshape(-1)), num_keys=2)
    last = jnp.maximum(budget - 1, 0)
    last_rank, last_number = ranks[last], numbers[last]
    taken = (rank < last_rank) | ((rank == last_rank) & (number <= last_number))
    return taken & valid & (budget > 0)


def _taken_by_counting(order, budget, valid):
    """Counts for every slot (r, i) the valid slots (s, j) that come before it."""
    batch, width = order.shape
    row, column = jnp.arange(batch)[:, None, None, None], jnp.arange(width)[None, :, None, None]
    other_row, other_column = jnp.arange(batch)[None, None, :, None], jnp.arange(width)[None, None, None, :]
    mine, other = order[:, :, None, None], order[None, None, :, :]
    earlier_column = other_column < column
    wins_tie = earlier_column | ((other_column == column) & (other_row < row))
    before = (other > mine) | ((other == mine) & wins_tie)
    # Constant within a request: survival never increases, so an earlier slot is never behind a later one.
    before = jnp.where(other_row == row, earlier_column, before)
    num_before = jnp.sum(before & valid[None, None, :, :], axis=(2, 3), dtype=jnp.int32)
    return (num_before < budget) & valid


def _ordered_bits(values):
    """Integers in the order of the floats: -inf and NaN lowest, -0 equal to 0, subnormal numbers apart.

    Devices differ in how they compare subnormal numbers; integers are compared alike everywhere.
    """
    values = values if values.dtype == jnp.float64 else values.astype(jnp.float32)
    as_int = jnp.int64 if values.dtype == jnp.float64 else jnp.int32
    infinity = jax.lax.bitcast_convert_type(jnp.asarray(jnp.inf, values.dtype), as_int)
    largest = jnp.iinfo(as_int).max
    bits = jax.lax.bitcast_convert_type(values, as_int)
    magnitude = bits & largest
    bits = jnp.where(
        magnitude == 0, 0, jnp.where(magnitude > infinity, -infinity, jnp.where(bits < 0, -magnitude, bits))
    )
    return bits
