"""The contract of a policy: what it is given, what it decides, what it declares."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specav._checks import shaped
from specav.features import FEATURES, DraftFeatures
from specav.trimmer import count_prefix


class PolicyInputs(NamedTuple):
    """What a policy may look at in a round. Fields that it does not read may be None.

    Attributes:
      features: `DraftFeatures` of float32 [B, K].
      draft_tokens: int32 [B, K].
      num_drafts: int32 [B], required: every draft that was drawn. It must depend on committed tokens only: lowering it
        by what was drawn is a decision in disguise, and a leak.
      acceptance: float32 [B, K], an estimator's predictions.
      survival: float32 [B, K], `survival_probabilities(acceptance, num_drafts)`.
      active: bool [B], requests still decoding; the others verify nothing. None: all.
      num_base_tokens: int32 [], tokens of this step that are not drafts. None: one per active request, its last token.
      num_sampling: int32 [], requests that emit a token in this step. None: the active ones.
      num_drafting: int32 [], requests that paid for drafting. None: those with drafts.
    """

    features: DraftFeatures | None = None
    draft_tokens: Int[Array, "B K"] | None = None
    num_drafts: Int[Array, " B"] | None = None
    acceptance: Float[Array, "B K"] | None = None
    survival: Float[Array, "B K"] | None = None
    active: Bool[Array, " B"] | None = None
    num_base_tokens: int | Int[Array, ""] | None = None
    num_sampling: int | Int[Array, ""] | None = None
    num_drafting: int | Int[Array, ""] | None = None


class Policy(NamedTuple):
    """A decision what to verify, as pure functions, with a declaration of what it looks at.

    Attributes:
      init: () -> state, a pytree.
      decide: (state, PolicyInputs) -> (num_verified int32 [B], state); 0 <= num_verified <= num_drafts.
      name: for messages and tables.
      window: what the decision whether x_i is verified reads: "past", values of earlier rounds only; "causal", also of
        positions <= i of its own request; "block", of any position of this round.
      reads: the inputs of this round that it reads: names of `FEATURES`, "acceptance", "survival", "draft_tokens".
        num_drafts and the counts are always allowed.
      couples: what it reads of other requests in this round: "none"; "sequential", if slots are admitted in one order,
        each decided from what earlier admissions revealed, which keeps the joint law of the batch; "live", anything
        else, which keeps every request's own law and may bend the joint one.
      slots: (state, PolicyInputs) -> (bool [B, K], state), the same decision slot by slot, for analysis; a prefix of
        every row. None where the decision reads no slot of this round.
    """

    init: Callable[[], Any]
    decide: Callable[[Any, PolicyInputs], tuple[Int[Array, " B"], Any]]
    name: str
    window: str
    reads: tuple[str, ...]
    couples: str
    slots: Callable[[Any, PolicyInputs], tuple[Bool[Array, "B K"], Any]] | None = None


def by_number(name: str, number: int) -> Policy:
    """A stateless policy that verifies a constant number of drafts, or all there are."""

    def decide(state, inputs):
        return jnp.minimum(usable_drafts(inputs), number), state

    return Policy(no_state, decide, name, "past", (), "none")


def by_slots(
    name: str,
    slots: Callable[[Any, PolicyInputs], tuple[Bool[Array, "B K"], Any]],
    *,
    window: str,
    reads: tuple[str, ...],
    couples: str,
    init: Callable[[], Any] | None = None,
) -> Policy:
    """A policy from its decision slot by slot, which must be a prefix of every row."""

    def decide(state, inputs):
        mask, state = slots(state, inputs)
        return count_prefix(mask), state

    return Policy(no_state if init is None else init, decide, name, window, reads, couples, slots)


def no_state() -> tuple[()]:
    """The state of policies that have none."""
    return ()


def usable_drafts(inputs: PolicyInputs) -> Int[Array, " B"]:
    """num_drafts, at least 0, and 0 for requests that are not active.

    Raises:
      TypeError, ValueError: num_drafts is missing, or wrong dtypes or shapes.
    """
    dims: dict[str, Any] = {}
    if inputs.num_drafts is None:
        raise ValueError("inputs.num_drafts: every policy needs it, got None")
    num_drafts = shaped(dims, "inputs.num_drafts", inputs.num_drafts, "B", "int").astype(jnp.int32)
    if inputs.active is not None:
        num_drafts = jnp.where(shaped(dims, "inputs.active", inputs.active, "B", "bool"), num_drafts, 0)
    return jnp.maximum(num_drafts, 0)


def read_input(policy_name: str, inputs: PolicyInputs, name: str) -> Float[Array, "B K"]:
    """An input of float [B, K] by its name: a feature, "acceptance" or "survival".

    Raises:
      TypeError, ValueError: it is missing, or of a wrong dtype or shape.
    """
    source = inputs.features if name in FEATURES else inputs
    values = None if source is None else getattr(source, name)
    where = f"inputs.{'features.' if name in FEATURES else ''}{name}"
    if values is None:
        raise ValueError(f"{where}: policy {policy_name!r} reads it, got None")
    return shaped({"B": usable_drafts(inputs).shape[0]}, where, values, "B K", "float")
