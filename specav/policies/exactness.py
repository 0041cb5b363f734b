"""Under which verification rules a policy leaves the target's law untouched, by its declaration."""

from typing import NamedTuple

from specav._checks import one_of
from specav.features import FEATURES
from specav.labels import RULES
from specav.policies.base import Policy

DRAFTERS = ("autoregressive", "parallel", "point_mass")
WINDOWS = ("past", "strict", "causal", "block")
COUPLINGS = ("none", "sequential", "live")


class Verdict(NamedTuple):
    """What follows from a policy's declaration (not from its code).

    Attributes:
      dependence: see `declared_dependence`.
      marginal: rules under which every request's own output law is exact.
      joint: rules under which the joint law of a batch is exact as well. It matters when samples are compared, as with
        several answers to one prompt.
    """

    dependence: str
    marginal: tuple[str, ...]
    joint: tuple[str, ...]


def declared_dependence(policy: Policy, acceptance_depends_on: str = "prefix") -> str:
    """What the decision about draft x_i depends on: the declared window and the class of what is read in it.

    Args:
      policy: its declaration is checked.
      acceptance_depends_on: class of the estimator behind acceptance and survival (`AcceptanceEstimator.depends_on`).

    Returns:
      "past" (earlier rounds), "prefix" (draft laws up to q_i, drafts before x_i), "draw" (x_i as well), or "block".

    Raises:
      ValueError: unknown names in the declaration or arguments.
    """
    one_of("acceptance_depends_on", acceptance_depends_on, ("prefix", "draw"))
    one_of(f"window of policy {policy.name!r}", policy.window, WINDOWS)
    one_of(f"couples of policy {policy.name!r}", policy.couples, COUPLINGS)
    for read in policy.reads:
        one_of(f"reads of policy {policy.name!r}", read, (*FEATURES, "acceptance", "survival", "draft_tokens"))
    if policy.window in ("past", "block"):
        return policy.window
    if policy.window == "strict":  # draws before x_i are part of its prefix
        return "prefix"
    return "draw" if _draw_reads(policy, acceptance_depends_on) else "prefix"


def verdict(policy: Policy, *, acceptance_depends_on: str = "prefix", drafter: str = "autoregressive") -> Verdict:
    """Under which rules a policy is lossless, if its declaration is true.

    Past and prefix decisions are exact under every rule, draw decisions under the coupled and the deferred one, block
    decisions under the deferred one. Two kinds of drafter allow more. Point-mass drafts have nothing random to look
    at: anything goes. A parallel drafter's laws are all known before any draw: a block policy that reads prefix
    features only sees no draw. (There "prefix" must mean functions of the laws alone: features of *earlier drawn*
    tokens are draws of the block, so declare their estimator as "draw".)

    Args:
      policy, acceptance_depends_on: as in `declared_dependence`.
      drafter: "autoregressive" (Markov heads included), "parallel" or "point_mass", `Drafter.kind`.

    Returns:
      A `Verdict`.

    Raises:
      ValueError: unknown names.
    """
    one_of("drafter", drafter, DRAFTERS)
    reads = declared_dependence(policy, acceptance_depends_on)
    sees_no_draw = drafter == "point_mass" or (drafter == "parallel" and not _draw_reads(policy, acceptance_depends_on))
    if sees_no_draw or reads == "past":
        return Verdict(reads, RULES, RULES)
    marginal = {"prefix": RULES, "draw": ("coupled", "deferred"), "block": ("deferred",)}[reads]
    return Verdict(reads, marginal, ("deferred",) if policy.couples == "live" else marginal)


def lossless_rules(
    policy: Policy,
    acceptance_depends_on: str = "prefix",
    drafter: str = "autoregressive",
    *,
    joint: bool = True,
) -> tuple[str, ...]:
    """The verification rules under which a policy keeps the target's law; see `verdict`.

    Args:
      policy, acceptance_depends_on, drafter: as in `verdict`.
      joint: whether the joint law of the batch counts, or every request's own law alone.

    Raises:
      ValueError: unknown names.
    """
    found = verdict(policy, acceptance_depends_on=acceptance_depends_on, drafter=drafter)
    return found.joint if joint else found.marginal


def require_lossless(
    policy: Policy,
    rule: str,
    acceptance_depends_on: str = "prefix",
    drafter: str = "autoregressive",
    *,
    joint: bool = True,
) -> None:
    """Refuses a policy that may bend the output law under a rule.

    Args:
      policy, acceptance_depends_on, drafter, joint: as in `lossless_rules`.
      rule: "standard", "coupled" or "deferred".

    Raises:
      ValueError: not lossless; the message names the policy, what it reads, the rule, and the rules that would do.
    """
    one_of("rule", rule, RULES)
    found = verdict(policy, acceptance_depends_on=acceptance_depends_on, drafter=drafter)
    if rule in (found.joint if joint else found.marginal):
        return
    head = f"policy {policy.name!r} is not lossless under the {rule} rule"
    if rule in found.marginal:
        raise ValueError(
            f"{head}: it reads {_quoted(policy.reads)} of other requests before they are revealed, which bends the "
            f"joint law of the batch (every request's own law is exact: joint=False). "
            f"Lossless under: {', '.join(found.joint)}"
        )
    if found.dependence == "block":
        why = f"whether draft i is verified reads {_quoted(policy.reads)} at later positions of its own request"
    else:
        culprits = _draw_reads(policy, acceptance_depends_on)
        why = f"whether draft i is verified reads {_quoted(culprits)}, which depends on the drawn token x_i itself"
        if not {*culprits} & {*FEATURES, "draft_tokens"}:
            why += " (the estimator's features are of class 'draw')"
    raise ValueError(f"{head} with {drafter} drafts: {why}. Lossless under: {', '.join(found.marginal)}")


def _draw_reads(policy, acceptance_depends_on):
    """The inputs read that are functions of the drawn token."""
    draws = {"draft_tokens"} | {name for name, spec in FEATURES.items() if spec.depends_on == "draw"}
    if acceptance_depends_on == "draw":
        draws |= {"acceptance", "survival"}
    return tuple(name for name in policy.reads if name in draws)


def _quoted(names):
    return ", ".join(map(repr, names)) if names else "values"
