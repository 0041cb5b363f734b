"""The contract of a policy: what it is given, what it decides, what it declares."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specav._checks import shaped
from specav.features import FEATURES, DraftFeatures
from specav.trimmer import allocate_slots, count_prefix


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
      last_accepted: int32 [B], drafts accepted in the request's previous round, 0 before its first one.
      last_tested: int32 [B], drafts tested in it.
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
    last_accepted: Int[Array, " B"] | None = None
    last_tested: Int[Array, " B"] | None = None


class Admission(NamedTuple):
    """A decision by rank: the best slots are admitted until a budget is spent (`allocate_budget`).

    If the score of a slot reads nothing later than the rule allows for its draft, nothing of other requests, and the
    budget is known from earlier rounds, slots are admitted in one sequential order, each decided from what earlier
    admissions revealed: the joint law of the batch is exact. `specav.lossless.certify` checks these premises.

    Attributes:
      scores: float32 [B, K]; a running minimum along K is taken.
      budget: int32 [], slots to admit over the whole batch.
    """

    scores: Float[Array, "B K"]
    budget: Int[Array, ""]


class Policy(NamedTuple):
    """A decision what to verify, as pure functions, with a declaration of what it looks at.

    Attributes:
      init: () -> state, a pytree.
      decide: (state, PolicyInputs) -> (num_verified int32 [B], state); 0 <= num_verified <= num_drafts.
      name: for messages and tables.
      window: what the decision whether x_i is verified reads: "past", values of earlier rounds only; "strict", also of
        positions < i of its own request (stop after x_i, and still verify it); "causal", of positions <= i; "block",
        of any position of this round.
      reads: the inputs of this round that it reads: names of `FEATURES`, "acceptance", "survival", "draft_tokens".
        num_drafts, the counts and what the previous round showed are always allowed.
      couples: what it reads of other requests in this round: "none"; "sequential", if slots are admitted in one order,
        each decided from what earlier admissions revealed, which keeps the joint law of the batch; "live", anything
        else, which keeps every request's own law and may bend the joint one.
      slots: (state, PolicyInputs) -> (bool [B, K], state), the same decision slot by slot, for analysis; a prefix of
        every row. None where the decision reads no slot of this round.
      admission: (state, inputs) -> (Admission, state), if the decision is one of `by_admission`; else None.
    """

    init: Callable[[], Any]
    decide: Callable[[Any, PolicyInputs], tuple[Int[Array, " B"], Any]]
    name: str
    window: str
    reads: tuple[str, ...]
    couples: str
    slots: Callable[[Any, PolicyInputs], tuple[Bool[Array, "B K"], Any]] | None = None
    admission: Callable[[Any, PolicyInputs], tuple[Admission, Any]] | None = None


def from_function(
    decide: Callable[[Any, PolicyInputs], tuple[Int[Array, " B"], Any]],
    *,
    name: str = "user policy",
    init: Callable[[], Any] | None = None,
) -> Policy:
    """A policy from a function alone, declared to read everything, so that only the deferred rule takes it unseen.

    What it really reads is for `specav.lossless.certify` to find out; what the answer allows can then be declared
    (`policy._replace(window=..., reads=..., couples=...)`).

    Args:
      decide: (state, PolicyInputs) -> (num_verified int32 [B], state); decoders clamp to 0..num_drafts.
      name: for messages.
      init: () -> state. Default: no state.
    """
    reads = (*FEATURES, "acceptance", "survival", "draft_tokens")
    return Policy(no_state if init is None else init, decide, name, "block", reads, "live")


def by_number(name: str, number: int) -> Policy:
    """A stateless policy that verifies a constant number of drafts, or all there are.

    Args:
      name: for messages.
      number: drafts per request and round.
    """

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
    """A policy from its decision slot by slot, which must be a prefix of every row.

    Args:
      name, slots, window, reads, couples: as in `Policy`.
      init: () -> state. Default: no state.
    """

    def decide(state, inputs):
        mask, state = slots(state, inputs)
        return count_prefix(mask), state

    return Policy(no_state if init is None else init, decide, name, window, reads, couples, slots)


def by_admission(
    name: str,
    admission: Callable[[Any, PolicyInputs], tuple[Admission, Any]],
    *,
    window: str,
    reads: tuple[str, ...],
    couples: str = "sequential",
    init: Callable[[], Any] | None = None,
    method: str = "sort",
) -> Policy:
    """A policy that admits the best slots of the batch: num_verified = allocate_budget(scores, budget, K_r).

    Args:
      admission: (state, inputs) -> (Admission, state).
      method: of `allocate_slots`; the result is the same.
      name, window, reads, couples, init: as in `Policy`.
    """

    def slots(state, inputs):
        (scores, budget), state = admission(state, inputs)
        return allocate_slots(scores, budget, usable_drafts(inputs), method=method), state

    policy = by_slots(name, slots, window=window, reads=reads, couples=couples, init=init)
    return policy._replace(admission=admission)


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


def last_verdicts(policy_name: str, inputs: PolicyInputs) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """(last_accepted, last_tested), int32 [B].

    Raises:
      TypeError, ValueError: one is missing, or of a wrong dtype or shape.
    """
    dims: dict[str, Any] = {"B": usable_drafts(inputs).shape[0]}
    found = []
    for name in ("last_accepted", "last_tested"):
        value = getattr(inputs, name)
        if value is None:
            raise ValueError(f"inputs.{name}: policy {policy_name!r} reads it, got None")
        found.append(shaped(dims, f"inputs.{name}", value, "B", "int").astype(jnp.int32))
    return found[0], found[1]


def read_input(policy_name: str, inputs: PolicyInputs, name: str) -> Float[Array, "B K"]:
    """An input of float [B, K] by its name: a feature, "acceptance" or "survival".

    Raises:
      TypeError, ValueError: it is missing, or of a wrong dtype or shape.
    """
    rows = usable_drafts(inputs).shape[0]
    source = inputs.features if name in FEATURES else inputs
    values = None if source is None else getattr(source, name)
    where = f"inputs.{'features.' if name in FEATURES else ''}{name}"
    if values is None:
        raise ValueError(f"{where}: policy {policy_name!r} reads it, got None")
    return shaped({"B": rows}, where, values, "B K", "float")
