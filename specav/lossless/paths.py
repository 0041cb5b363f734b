"""How many histories an exact enumeration may need: known before it starts, so that it can be refused."""

import functools
from typing import NamedTuple

from specav._checks import static_int


def bound_on_paths(
    *,
    rule: str,
    refill: str,
    num_drafts: tuple[int, ...],
    num_tokens: int,
    vocabulary: int,
    num_rounds: int | None,
    point_mass: bool,
    memoryless: bool,
    sees_verdicts: bool,
) -> int:
    """An upper bound on the rows that are made for one batch, whatever the policy decides.

    Requests branch independently of each other given the decisions, so that the largest number of histories is a
    product over requests of the worst case of each. Where nothing but tokens is remembered, there are no more worlds
    between rounds than sequences (and last verdicts, and kept drafts), which is usually a far smaller bound.

    Args:
      rule, refill: as in `exact_output_law`.
      num_drafts: K_r of every request.
      num_tokens, vocabulary, num_rounds: n, V, and the number of rounds or None.
      point_mass: drafts are not random.
      memoryless: neither the policy nor the estimator it reads has a state (nor do kept drafts have an age).
      sees_verdicts: the policy reads the verdicts of the previous round.
    """
    rounds = num_tokens if num_rounds is None else min(static_int("num_rounds", num_rounds, 0), num_tokens)
    draws = 1 if point_mass else vocabulary
    histories = worlds = branches = endings = 1
    for width in num_drafts:
        histories *= _histories(rule, refill, width, draws, vocabulary, num_tokens, rounds)
        worlds *= sum(vocabulary**length for length in range(num_tokens + 1))
        worlds *= (width + 1) * (width + 2) // 2 if sees_verdicts else 1
        if rule == "deferred":  # what is kept of a block, or the bonus that it owes
            worlds *= sum(draws**kept for kept in range(width + 1)) + 1
        branches *= draws**width * max(sum(o.ways for o in each) for each in _outcomes(rule, refill, width, vocabulary))
        endings *= 0 if num_rounds is None else (width + 1) * vocabulary**num_tokens
    return min(histories, worlds * (rounds * branches + endings)) if rounds and memoryless else histories


class _Outcome(NamedTuple):
    """`ways` histories that emit `emitted` tokens and leave `left` drafts, or a bonus that is owed."""

    ways: int
    emitted: int
    left: int = 0
    owes: bool = False


def _outcomes(rule, refill, width, vocabulary):
    """What may become of a block of `width` drafts: a list of outcomes for every decision n = 0..width."""
    found = []
    for verified in range(width + 1):
        tested = verified if rule == "standard" else min(verified + 1, width)
        each = [_Outcome(max(vocabulary - 1, 1), emitted) for emitted in range(1, tested + 1)]  # a rejection
        if tested == verified:
            each.append(_Outcome(vocabulary, tested + 1))  # a bonus
        elif rule == "deferred":
            each.append(_Outcome(1, tested, width - tested, refill == "block" and width == tested))
        else:
            each.append(_Outcome(1, tested))
        found.append(each)
    return found


def _histories(rule, refill, width, draws, vocabulary, num_tokens, rounds):
    """Leaves of the tree of one request, every round deciding for the most of them."""

    @functools.cache
    def leaves(missing, kept, owes, rounds):
        if missing <= 0:
            return 1
        if rounds == 0:  # kept drafts are tested, the rest is drawn from the target
            return vocabulary**missing * (kept + 1)
        block = kept if owes or (kept and refill == "block") else width
        below = [
            sum(o.ways * leaves(missing - o.emitted, o.left, o.owes, rounds - 1) for o in each)
            for each in _outcomes(rule, refill, block, vocabulary)
        ]
        return draws ** (block - kept) * max(below)

    return leaves(num_tokens, 0, False, rounds)
