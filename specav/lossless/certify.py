"""Proofs that a policy is lossless, from its code.

`certify` compares what a policy's decisions can depend on (`dependence`) with what a verification rule lets them know.
It answers "proved", "leak" or "not decided", apart for every request's own output law (marginal) and for the joint law
of the batch. "Proved" holds for all inputs at the given shapes. "Leak" is said only with a counterexample at hand: two
inputs that agree in what the decisions reveal, and decisions that differ (`check_non_anticipating`).

What may be known, for c = 0 under the standard rule and c = 1 under the coupled one: whether draft i is verified
(n >= i) may read drafts x_j with j < i + c and draft laws q_j with j <= i + c of its own request. Then the event
{n = m} is a function of what n = m reveals, and what it leaves unrevealed can be drawn anew without a trace in the
output. For the marginal law anything of *other* requests may be read: given the past it is independent of one's own
drafts. For the joint law, nothing of them that is drawn in this round, unless slots are admitted in one order, each
decided from what earlier admissions revealed. That is so if a budget is known from earlier rounds and spent on the best
slots by scores that read what their own slot allows: the next slot to be admitted is the best of the requests' next
slots, and the scores of these read revealed things only. A policy shows that it is of this form by its `admission`,
which is not believed: its scores and budget are analysed, and `decide` must be, equation by equation, the program that
`by_admission` builds from it.
"""

from typing import Any, NamedTuple

import jax
import numpy as np

from specav._checks import one_of
from specav.features import FEATURES
from specav.lossless._same_program import same_program
from specav.lossless.anticipation import check_non_anticipating
from specav.lossless.jaxpr_dependence import (
    Dependence,
    admission_dependence,
    dependence,
    example_inputs,
    example_state,
)
from specav.lossless.scheme import Scheme, as_scheme, scheme_fault
from specav.policies import RULES, Policy
from specav.policies.base import by_admission

PROVED, LEAK, NOT_DECIDED = "proved", "leak", "not decided"
_REVEALED = "no decision can read what is not revealed by then"


class Certificate(NamedTuple):
    """What `certify` found; `str()` says it in a sentence or two.

    Attributes:
      policy, rule, drafter: what was judged, by name.
      marginal: "proved", "leak" or "not decided": every request's own output law.
      joint: the same for the joint law of the batch.
      marginal_reason, joint_reason: why, in words.
      dependence: what the decisions may depend on; None where that did not matter or could not be found out.
      num_requests, num_draft_tokens: B and K, the shapes that the verdict is about.
    """

    policy: str
    rule: str
    drafter: str
    marginal: str
    joint: str
    marginal_reason: str
    joint_reason: str
    dependence: Dependence | None
    num_requests: int
    num_draft_tokens: int

    @property
    def proved(self) -> bool:
        """Both laws are proved exact."""
        return self.marginal == self.joint == PROVED

    def __str__(self) -> str:
        """The verdict in words."""
        if self.proved:
            return f"proved lossless under the {self.rule} rule (marginal and joint): {self.joint_reason}"
        if self.marginal == LEAK or (self.marginal, self.marginal_reason) == (self.joint, self.joint_reason):
            return _sentence(self.marginal, self.marginal_reason)  # a leak of one request bends the joint law as well
        return (
            f"each request's own law: {_sentence(self.marginal, self.marginal_reason)}; "
            f"joint law of the batch: {_sentence(self.joint, self.joint_reason)}"
        )


def certify(
    policy: Policy,
    *,
    rule: str,
    drafter: str | Scheme = "autoregressive",
    num_requests: int = 64,
    num_draft_tokens: int = 8,
    acceptance_depends_on: str = "prefix",
    state: Any = None,
) -> Certificate:
    """Proves a policy lossless under a verification rule, finds a leak, or says why neither could be done.

    The declaration (`window`, `reads`, `couples`, `slots`) is not looked at. `decide` is traced with every field of
    `PolicyInputs` given. Assumed are the documented meanings of the fields: num_drafts, active, counts, last_accepted,
    last_tested and the state come from earlier rounds; features[r, j] are functions of q_j ("prefix") or of q_j and x_j
    ("draw"); acceptance[r, j] is a function of such features; survival is `survival_probabilities` of it. With a
    parallel drafter "prefix" must mean the laws alone.

    Args:
      policy: `decide` must be traceable, and a pure function.
      rule: "standard", "coupled" or "deferred".
      drafter: a kind of drafter, or a `Scheme`, which is searched for faults of the laws on random logits first.
      num_requests, num_draft_tokens: B and K.
      acceptance_depends_on: class of the estimator behind acceptance and survival, "prefix" or "draw".
      state: as in `dependence`.

    Returns:
      A `Certificate`.

    Raises:
      TypeError, ValueError: unknown names, sizes out of range, a malformed decision, or what the policy raises.
    """
    one_of("rule", rule, RULES)
    one_of("acceptance_depends_on", acceptance_depends_on, ("prefix", "draw"))
    scheme = as_scheme(drafter)
    sizes = {"num_requests": num_requests, "num_draft_tokens": num_draft_tokens}
    both = lambda verdict, reason: Certificate(  # noqa: E731
        policy.name, rule, scheme.drafter, verdict, verdict, reason, reason, None, num_requests, num_draft_tokens
    )
    if fault := scheme_fault(scheme):
        return both(LEAK, fault)
    if rule == "deferred":
        return both(PROVED, "every draft is tested sooner or later, so that a decision only schedules work")
    if scheme.drafter == "point_mass":
        return both(PROVED, "the drafts are point masses, nothing about them is random")
    try:
        reads = dependence(policy, **sizes, state=state)
    except (jax.errors.ConcretizationTypeError, NameError) as error:  # Python branches; an axis of a mesh
        first_line = str(error).strip().splitlines()[0]
        return both(NOT_DECIDED, f"the policy cannot be traced by itself: {first_line}")

    allowed = _Allowed(rule, scheme.drafter, acceptance_depends_on)
    found = both(PROVED, _REVEALED)._replace(dependence=reads)
    marginal, joint = allowed.forbidden(reads, joint=False), allowed.forbidden(reads, joint=True)
    if not joint:
        return _with_caution(found, drafter)
    not_ordered = ""
    if policy.admission is not None:
        not_ordered = _why_not_in_order(policy, allowed, sizes, state)
        if not not_ordered:
            reason = "a budget known beforehand is spent on scores that read nothing but what is revealed by then"
            return _with_caution(found._replace(marginal_reason=reason, joint_reason=reason), drafter)
    search = check_non_anticipating(
        policy, rule=rule, drafter=scheme, acceptance_depends_on=acceptance_depends_on, state=state, **sizes
    )
    verdicts = [_judged(reads, marginal, search.marginal, search.num_checks)]
    verdicts.append(_judged(reads, joint, search.joint or search.marginal, search.num_checks, not_ordered))
    (marginal_verdict, marginal_reason), (joint_verdict, joint_reason) = verdicts
    return found._replace(
        marginal=marginal_verdict, joint=joint_verdict, marginal_reason=marginal_reason, joint_reason=joint_reason
    )


def _with_caution(found, drafter):
    """A proof is about the policy; laws that a caller describes were only tried out."""
    if not isinstance(drafter, Scheme) or drafter == Scheme(drafter=drafter.drafter):
        return found
    reason = f"{found.joint_reason} (the laws of {drafter.name!r} were tried on random logits only)"
    return found._replace(marginal_reason=reason, joint_reason=reason)


class _Allowed:
    """What a rule and a kind of drafter let a decision know."""

    def __init__(self, rule, drafter, acceptance_depends_on):
        self.ahead = int(rule == "coupled")
        self.laws_known = drafter == "parallel"
        self.draws = {"draft_tokens"} | {name for name, spec in FEATURES.items() if spec.depends_on == "draw"}
        if acceptance_depends_on == "draw":
            self.draws |= {"acceptance", "survival"}

    def levels(self, name: str, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Element j of an input is a function of the laws up to q_law and the drafts up to x_draw; int [K] each."""
        position = np.arange(1, width + 1)
        draw = position if name in self.draws else np.zeros_like(position)
        law = np.zeros_like(position) if self.laws_known or name == "draft_tokens" else position
        return law, draw

    def drawn_now(self, name: str, width: int) -> np.ndarray:
        """Which elements of a request are not known before the round, bool [K]; q_1 follows from the past."""
        law, draw = self.levels(name, width)
        return (law > 1) | (draw > 0)

    def forbidden(self, reads: Dependence, *, joint: bool) -> dict[str, np.ndarray]:
        """By input, bool [B, K, B, K]: what decision [r, i] may read of element [s, j] and must not know."""
        found = {}
        for name, where in reads.reads.items():
            rows, width = where.shape[:2]
            law, draw = self.levels(name, width)
            decision = np.arange(1, width + 1)[:, None]
            own = (law > decision + self.ahead) | (draw > decision - 1 + self.ahead)
            others = self.drawn_now(name, width) if joint else np.zeros(width, bool)
            same = np.eye(rows, dtype=bool)[:, None, :, None]
            wrong = where & np.where(same, own[None, :, None, :], others)
            if wrong.any():
                found[name] = wrong
        return found


def _why_not_in_order(policy, allowed, sizes, state):
    """Why a policy is not proved to spend a known budget on causal scores; "" if it is."""
    scores, budget = admission_dependence(policy, **sizes, state=state)
    wrong = allowed.forbidden(scores, joint=True)
    if wrong:
        return f"its scores do not go by what was revealed ({', '.join(wrong)})"
    for name, where in budget.reads.items():
        if (where & allowed.drawn_now(name, where.shape[-1])).any():
            return f"its budget reads {name} of this round"
    args = (example_state(policy, state), example_inputs(*sizes.values()))
    decided = jax.make_jaxpr(policy.decide)(*args)
    for method in ("sort", "pairwise"):
        built = by_admission(policy.name, policy.admission, window="block", reads=(), method=method)
        if same_program(decided, jax.make_jaxpr(built.decide)(*args)):
            return ""
    return "its decision is not the one that its admission describes"


def _judged(reads, wrong, witness, num_checks, not_ordered=""):
    """(verdict, reason) of one law, from what may wrongly be read and the counterexample found."""
    if witness is not None:
        return LEAK, f"{_offence(wrong, witness)}; {witness.explanation}"
    if not wrong:
        return PROVED, _REVEALED
    decisions = np.logical_or.reduce([where.any(axis=(2, 3)) for where in wrong.values()])
    names = [name for name, affected in reads.through.items() if (affected & decisions).any()]
    if names:
        reason = f"because of primitive {', '.join(names)}"
    else:
        reason = f"{_offence(wrong, None)}, but no counterexample was found in {num_checks} redraws"
    return NOT_DECIDED, reason + (f"; {not_ordered}" if not_ordered else "")


def _offence(wrong, witness):
    """In words, something that is read and must not be: what a counterexample is about, if there is one."""
    if not wrong:
        return "the analysis found nothing, which a counterexample refutes"
    places = [(name, *place) for name, where in wrong.items() for place in np.argwhere(where)[:1]]
    if witness is not None:
        decisions = [(witness.request, position - 1) for position in witness.positions]
        changed = [(change.request, change.position - 1) for change in witness.changed]
        exact = [
            (name, *decision, *place)
            for decision in decisions
            for place in changed
            for name, where in wrong.items()
            if where[decision][place]
        ]
        near = [
            (name, *decision, *np.argwhere(where[decision])[0])
            for decision in decisions
            for name, where in wrong.items()
            if where[decision].any()
        ]
        places = exact or near or places
    name, request, position, source, at = places[0]
    whose = "" if source == request else f" of request {source}"
    return f"whether draft {position + 1} of request {request} is verified reads {name} of draft {at + 1}{whose}"


def _sentence(verdict, reason):
    return f"{verdict}{', ' if reason.startswith('because') else ': '}{reason}"
