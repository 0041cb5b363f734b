"""Does a policy anticipate? A search for decisions that move when what they must not know is drawn anew.

A round decides counts n_r. Under the standard rule they reveal x_1..x_{n_r} of each request, under the coupled rule
x_1..x_{n_r + 1}, and the draft laws up to the next draft. A policy is exact if nothing else had a say: draw all that is
not revealed anew, of one request (its own law, the others held fixed) or of all (the joint law), and the counts stay.
This holds the policy to that at production shapes. It calls `decide` and believes no declaration.

A counterexample is real: its two inputs are both possible, and the policy was called on both. A search that finds none
proves nothing; `specav.lossless.certify` proves, and `exact_output_law` enumerates small cases.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specav._checks import one_of, static_int
from specav.lossless._counterexample import Decider, Move, Witness, witness_of
from specav.lossless._scenarios import BEST, PROPOSALS, WORST, Scenarios, draw, random_scenarios
from specav.lossless.scheme import Scheme, as_scheme, scheme_fault
from specav.policies import RULES, Policy

_CHAINS = 32  # batches that are decoded side by side, so that states evolve
_REDRAWS = 12  # per scenario, of any requests; and as many of one request's
_BOUNDARIES = 4  # joint counterexamples per round whose neighbourhood is searched for a marginal one


class Finding(NamedTuple):
    """What `check_non_anticipating` found; `str()` says it in words.

    Attributes:
      policy, rule, drafter: what was checked, by name.
      marginal: a decision about a request that moved when its own unrevealed part alone was drawn anew: that request's
        own output law is not safe. None: not found.
      joint: a decision that moved when unrevealed parts of any requests were drawn anew: the joint law of the batch is
        not safe. Every marginal counterexample is one of the joint law too.
      scheme: what is wrong with the scheme's laws, whatever the policy (`scheme_fault`); None if nothing.
      num_checks: pairs of inputs whose decisions were compared. 0 where the rule and the drafts forbid nothing.
      num_requests, num_draft_tokens: B and K.
    """

    policy: str
    rule: str
    drafter: str
    marginal: Witness | None
    joint: Witness | None
    scheme: str | None
    num_checks: int
    num_requests: int
    num_draft_tokens: int

    @property
    def passed(self) -> bool:
        """Nothing was found, in the policy or the scheme."""
        return self.marginal is None and self.joint is None and self.scheme is None

    def __str__(self) -> str:
        """The finding in words, a line for each law."""
        lines = [f"policy {self.policy!r}, {self.rule} rule, {self.drafter} drafts:"]
        if not self.num_checks:
            because = "every draft is tested sooner or later" if self.rule == "deferred" else "drafts are not random"
            lines.append(f"nothing to check, any decision is exact ({because})")
        else:
            none = f"no counterexample in {self.num_checks} redraws at B={self.num_requests}, K={self.num_draft_tokens}"
            lines += [
                f"{law}: {none if witness is None else f'not safe, {witness.explanation}'}"
                for law, witness in (("each request's own law", self.marginal), ("joint law of the batch", self.joint))
            ]
        if self.scheme is not None:
            lines.append(f"scheme: {self.scheme}")
        return "\n  ".join(lines)


def check_non_anticipating(
    policy: Policy,
    *,
    rule: str,
    drafter: str | Scheme = "autoregressive",
    num_requests: int = 64,
    num_draft_tokens: int = 8,
    vocabulary: int = 8,
    acceptance_depends_on: str = "prefix",
    num_scenarios: int | None = None,
    seed: int = 0,
    state: Any = None,
) -> Finding:
    """Searches for a decision that depends on what the verification rule forbids it to know.

    Batches of random draft models are decoded side by side, so that the policy's state evolves. In every round what
    the decisions do not reveal is drawn anew many times, of all requests, of some, of one; drafts are ragged, nearly
    empty batches are among them, and so are ties and one-hot laws. A counterexample is shrunk: it changes as few drafts
    as possible, none of which could be restored alone. It is checked by calling the policy once more on both inputs.

    Not found is not proved. Out of sight are reactions to features that the random laws never show, to token numbers
    from `vocabulary` on, and states that `num_scenarios` / 32 rounds do not reach (give one as `state`).

    Args:
      policy: `decide` must be jittable; it is mapped over batches with vmap.
      rule: "standard", "coupled" or "deferred" (which forbids nothing).
      drafter: a kind of drafter, or a `Scheme`; its law makes the drafts and their features.
      num_requests, num_draft_tokens: B and K, the shapes that the policy is given.
      vocabulary: V of the draft models, at least 2.
      acceptance_depends_on: class of the estimator behind acceptance and survival: "prefix" predictions are functions
        of the prefix features of their own position, "draw" ones of `logit_q_sampled` as well.
      num_scenarios: rounds of batches, rounded up to a multiple of 32. Default: 768, more at small shapes, up to 3072.
      seed: of everything random.
      state: the policy's state at the start. Default: `policy.init()`.

    Returns:
      A `Finding`.

    Raises:
      TypeError, ValueError: unknown names, sizes out of range, or what `policy.decide` raises.
    """
    one_of("rule", rule, RULES)
    one_of("acceptance_depends_on", acceptance_depends_on, ("prefix", "draw"))
    scheme = as_scheme(drafter)
    batch = static_int("num_requests", num_requests, 1)
    width = static_int("num_draft_tokens", num_draft_tokens, 1)
    vocabulary = static_int("vocabulary", vocabulary, 2)
    if num_scenarios is None:
        num_scenarios = min(3072, max(768, 768 * 512 // (batch * width)))
    rounds = -(-static_int("num_scenarios", num_scenarios, 1) // _CHAINS)
    rng = np.random.default_rng(static_int("seed", seed, 0))

    finding = Finding(policy.name, rule, scheme.drafter, None, None, scheme_fault(scheme), 0, batch, width)
    if rule == "deferred" or scheme.drafter == "point_mass":
        return finding
    state = policy.init() if state is None else state
    states = jax.tree.map(lambda leaf: jnp.broadcast_to(jnp.asarray(leaf), (_CHAINS, *jnp.shape(leaf))), state)
    accepted = tested = np.zeros((_CHAINS, batch), np.int32)
    num_checks = 0
    for _ in range(rounds):
        shape = (_CHAINS, batch, width, vocabulary)
        scenarios = random_scenarios(rng, shape, scheme, acceptance_depends_on, accepted, tested)
        decider = Decider(policy, rule, scheme, scenarios, states)
        chains = np.arange(_CHAINS)
        tokens = draw(
            rng,
            scenarios,
            chains,
            np.zeros(shape[:3], int),
            np.ones(shape[:3], bool),
            rng.integers(0, PROPOSALS, (_CHAINS, batch, 1)) * (rng.random((_CHAINS, batch, 1)) < 0.3),
        )
        decided, states = decider.decide(chains, tokens)
        marginal, joint = _search(rng, decider, tokens, decided, finding.marginal is None, finding.joint is None)
        finding = finding._replace(marginal=finding.marginal or marginal, joint=finding.joint or joint)
        num_checks += decider.num_compared
        if finding.marginal is not None and finding.joint is not None:
            break
        tested = decider.num_revealed(chains, decided).astype(np.int32)
        everything_passed = rng.random(tested.shape) < 0.4
        accepted = np.where(everything_passed, tested, rng.integers(0, tested + 1)).astype(np.int32)
    return finding._replace(num_checks=num_checks)


def _search(rng, decider, tokens, decided, want_marginal, want_joint):
    """One round's search: (marginal, joint), a `Witness` or None each.

    A redraw of everything tries all requests at once. Whoever's count moved in it is then tried alone.
    """
    chains = np.repeat(np.arange(_CHAINS), _REDRAWS)
    redrawn = _redraw_slots(rng, decider, chains, decided, alone=False)
    full = _redraw(rng, decider, chains, tokens, redrawn)
    moved = decider.decide_n(chains, full) != decided[chains]
    moves = [Move(chains[i], tokens[chains[i]], full[i]) for i in np.flatnonzero(moved.any(axis=1))]

    alone = _redraw_slots(rng, decider, chains, decided, alone=True)
    candidates = [(chains, _redraw(rng, decider, chains, tokens, alone), alone.any(axis=2).argmax(axis=1))]
    index, request = np.array(_some(rng, np.argwhere(moved), 512), int).reshape(-1, 2).T
    own = tokens[chains[index]].copy()
    own[np.arange(len(index)), request] = full[index, request]
    candidates.append((chains[index], own, request))

    marginal_moves = []
    for which, changed, requests in candidates:
        after = decider.decide_n(which, changed)
        differs = after != decided[which]
        moves += [Move(which[i], tokens[which[i]], changed[i]) for i in np.flatnonzero(differs.any(axis=1))]
        hit = differs[np.arange(len(which)), requests]
        marginal_moves += [Move(which[i], tokens[which[i]], changed[i], int(requests[i])) for i in np.flatnonzero(hit)]
    if want_marginal and not marginal_moves:
        marginal_moves = _search_boundaries(rng, decider, _some(rng, moves, _BOUNDARIES))
    marginal = witness_of(decider, marginal_moves) if want_marginal else None
    joint = witness_of(decider, moves) if want_joint else None
    return marginal, joint


def _search_boundaries(rng, decider, moves):
    """Marginal moves near joint ones: on the way from one block to the other, the last before and the first after.

    Where the counts are about to turn, one request's drafts may suffice to turn them, its own among them.
    """
    found = []
    for move in moves:
        requests = rng.permutation(np.flatnonzero((move.before != move.after).any(axis=1)))
        path = np.repeat(move.before[None], len(requests) + 1, axis=0)
        for step, request in enumerate(requests):
            path[step + 1 :, request] = move.after[request]
        on_path = decider.decide_n(np.full(len(path), move.chain), path)
        turn = int((on_path != on_path[0]).any(axis=1).argmax())
        if not turn:  # rounding
            continue
        if on_path[turn, requests[turn - 1]] != on_path[0, requests[turn - 1]]:
            return [Move(move.chain, path[turn - 1], path[turn], int(requests[turn - 1]))]
        for at in (turn - 1, turn):
            base, counts = path[at], on_path[at]
            which = np.full(96, move.chain)
            every = np.broadcast_to(counts, (decider.num_chains, *counts.shape))
            alone = _redraw_slots(rng, decider, which, every, alone=True)
            changed = _redraw(rng, decider, which, np.broadcast_to(base, (decider.num_chains, *base.shape)), alone)
            request = alone.any(axis=2).argmax(axis=1)
            hit = (decider.decide_n(which, changed) != counts)[np.arange(len(which)), request]
            found += [Move(move.chain, base, changed[i], int(request[i])) for i in np.flatnonzero(hit)]
        if found:
            break
    return found


def _redraw_slots(rng, decider, which, decided, alone):
    """Which unrevealed slots are drawn anew, bool [N, B, K]: all, or some, of all requests, of some, or of one."""
    scenarios: Scenarios = decider.scenarios
    revealed = decider.num_revealed(which, decided[which])
    everything = rng.random((len(which), 1)) < 0.5
    lengths = scenarios.num_drafts[which]
    later = np.minimum(revealed + rng.geometric(0.5, revealed.shape), np.maximum(lengths - 1, revealed))
    start = np.where(everything | (rng.random(revealed.shape) < 0.5), revealed, later)[..., None]
    single = ~everything & (rng.random(revealed.shape) < 0.3)
    column = np.arange(scenarios.row_of.shape[2])
    slots = (column >= start) & (column < lengths[..., None]) & (~single[..., None] | (column == start))
    can = slots.any(axis=2)
    if alone:
        rank = np.where(can, rng.random(can.shape), -1.0)
        chosen = np.arange(can.shape[1]) == rank.argmax(axis=1)[:, None]
    else:
        share = np.where(everything, 1.0, rng.choice([1.0, 0.5, 0.1], size=(len(which), 1)))
        chosen = rng.random(can.shape) < share
    return slots & chosen[..., None]


def _redraw(rng, decider, which, tokens, slots):
    """Blocks [N, B, K] of the chains' `tokens` with `slots` drawn anew, by one proposal, or one for each request."""
    same = rng.choice([*range(PROPOSALS), BEST, WORST], (len(which), 1, 1))
    own = rng.integers(0, PROPOSALS, (*slots.shape[:2], 1))
    proposal = np.where(rng.random((len(which), 1, 1)) < 0.5, same, own)
    return draw(rng, decider.scenarios, which, tokens[which], slots, proposal)


def _some(rng, items, number):
    """At most `number` of the items, in random order."""
    return [items[i] for i in rng.permutation(len(items))[:number]]
