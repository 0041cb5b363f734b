"""How many histories an exact enumeration may need: known before it starts, so that it can be refused."""

import functools

from specav._checks import static_int


def bound_on_paths(
    *,
    rule: str,
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
    between rounds than sequences (and last verdicts), which is usually a far smaller bound.

    Args:
      rule: "standard", "coupled" or "deferred".
      num_drafts: K_r of every request.
      num_tokens, vocabulary, num_rounds: n, V, and the number of rounds or None.
      point_mass: drafts are not random.
      memoryless: neither the policy nor the estimator it reads has a state, and no draft is kept.
      sees_verdicts: the policy reads the verdicts of the previous round.
    """
    rounds = num_tokens if num_rounds is None else min(static_int("num_rounds", num_rounds, 0), num_tokens)
    draws = 1 if point_mass else vocabulary
    histories, in_a_round = 1, rounds
    for width in num_drafts:
        histories *= _histories(rule, width, draws, vocabulary, num_tokens, rounds)
        sequences = sum(vocabulary**length for length in range(num_tokens + 1))
        verdicts = (width + 1) * (width + 2) // 2 if sees_verdicts else 1
        branches = draws**width * max(sum(count for _, count in each) for each in _verdicts(rule, width, vocabulary))
        in_a_round *= sequences * verdicts * branches
    if rounds and memoryless:
        return min(histories, in_a_round + vocabulary ** (num_tokens * len(num_drafts)))
    return histories


def _verdicts(rule, width, vocabulary):
    """For every decision n = 0..K: [(tokens emitted, number of ways), ...]."""
    found = []
    for verified in range(width + 1):
        tested = verified if rule == "standard" else min(verified + 1, width)
        outcomes = [(emitted, vocabulary - 1) for emitted in range(1, tested + 1)]  # a rejection, and a residual token
        outcomes.append((tested + 1, vocabulary) if tested == verified else (tested, 1))  # a bonus, or none
        found.append([(emitted, max(ways, 1)) for emitted, ways in outcomes])
    return found


def _histories(rule, width, draws, vocabulary, num_tokens, rounds):
    """Leaves of the tree of one request, every round deciding for the most of them. Kept drafts branch less."""
    decisions = _verdicts(rule, width, vocabulary)

    @functools.cache
    def leaves(missing, rounds):
        if missing <= 0:
            return 1
        if rounds == 0:  # kept drafts are tested, the rest is drawn from the target
            return vocabulary**missing * (width + 1 if rule == "deferred" else 1)
        below = [sum(ways * leaves(missing - emitted, rounds - 1) for emitted, ways in each) for each in decisions]
        return draws**width * max(below)

    return leaves(num_tokens, rounds)
