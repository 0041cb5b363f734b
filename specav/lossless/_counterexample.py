"""Counterexamples of the anticipation check: calling the policy on many blocks, shrinking, and saying it in words."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specav.lossless._scenarios import policy_inputs, possible_blocks
from specav.policies import PolicyInputs
from specav.survival import survival_probabilities

_ATTEMPTS = 3  # moves that are shrunk before a search is given up as rounding


class Change(NamedTuple):
    """A draft that differs between the two inputs: request (row of the batch), position (1..K), tokens."""

    request: int
    position: int
    before: int
    after: int


class Witness(NamedTuple):
    """Two possible inputs that agree in everything the decisions reveal, and get different decisions.

    Attributes:
      request: row of the batch (from 0) whose decision moved.
      positions: its draft positions (from 1) whose verification changed.
      before, after: num_verified of the request on the two inputs.
      changed: the drafts that differ, as few as could be had; the laws that follow from them differ too.
      explanation: the same in words.
      state: the policy's state.
      inputs_before, inputs_after: `PolicyInputs`, so that policy.decide(state, inputs_before)[0][request] == before.
    """

    request: int
    positions: tuple[int, ...]
    before: int
    after: int
    changed: tuple[Change, ...]
    explanation: str
    state: Any
    inputs_before: PolicyInputs
    inputs_after: PolicyInputs

    def __str__(self) -> str:
        """The explanation."""
        return self.explanation


class Move(NamedTuple):
    """Two blocks of tokens int [B, K] of one chain, equal in what is revealed, with different decisions.

    `request` is the one that must have moved; None: anyone.
    """

    chain: int
    before: np.ndarray
    after: np.ndarray
    request: int | None = None


class Decider:
    """A policy on the blocks of S chains in one round; counts how many decisions were compared."""

    def __init__(self, policy, rule, scheme, scenarios, states):
        """`states` are the policy's, stacked along a leading axis [S]."""
        self.policy, self.rule, self.scheme = policy, rule, scheme
        self.scenarios, self.states = scenarios, states
        self.num_chains, batch, width = scenarios.row_of.shape[:3]
        # One compilation, and blocks that stay in the caches.
        self._chunk = max(self.num_chains, min(512, 2**16 // (batch * width)))
        self.num_compared = 0

    def decide(self, which, tokens):
        """num_verified int32 [S, B] of one block per chain, and the chains' new states."""
        decided, states = self._call(which, tokens)
        return np.asarray(decided)[: len(which)], jax.tree.map(lambda leaf: leaf[: len(which)], states)

    def decide_n(self, which, tokens):
        """num_verified int32 [N, B] of blocks int [N, B, K] of chains int [N]."""
        self.num_compared += len(which)
        parts = [np.zeros((0, tokens.shape[1]), np.int32)]
        for start in range(0, len(which), self._chunk):
            part = slice(start, start + self._chunk)
            decided, _ = self._call(which[part], tokens[part])
            parts.append(np.asarray(decided)[: len(which[part])])
        return np.concatenate(parts)

    def decide_once(self, chain, tokens):
        """One block, apart from all others: (num_verified [B], state, inputs)."""
        inputs = jax.tree.map(lambda leaf: leaf[0], policy_inputs(self.scenarios, *_one(chain, tokens)))
        decided, state, survival = _decision(self.policy.decide, self.states, np.int32(chain), inputs)
        return np.asarray(decided), state, inputs._replace(survival=survival)

    def num_revealed(self, which, decided):
        """How many drafts of each request are revealed by these counts, int [N, B]."""
        decided = decided + (self.rule != "standard")
        return np.minimum(decided, self.scenarios.num_drafts[which])

    def _call(self, which, tokens):
        missing = self._chunk - len(which)
        which = np.concatenate([which, np.zeros(missing, which.dtype)])
        tokens = np.concatenate([tokens, np.zeros((missing, *tokens.shape[1:]), tokens.dtype)])
        inputs = policy_inputs(self.scenarios, which, tokens)
        return _decisions(self.policy.decide, self.states, which.astype(np.int32), inputs)


def witness_of(decider: Decider, moves: list[Move]) -> Witness | None:
    """The first of some moves, shrunk and confirmed; None if there are none.

    Confirmed: the policy is called on each input alone, in the same compiled form, and what changed is not revealed by
    what it decides there. What moved under vmap by rounding only is no counterexample.
    """
    for move in moves[:_ATTEMPTS]:
        move = _shrink(decider, move)
        before, state, inputs_before = decider.decide_once(move.chain, move.before)
        after, _, inputs_after = decider.decide_once(move.chain, move.after)
        differs = before != after
        if move.request is not None:
            differs &= np.arange(len(differs)) == move.request
        revealed = decider.num_revealed(np.array([move.chain]), before[None])[0]
        hidden = np.arange(move.before.shape[1]) >= revealed[:, None]
        if differs.any() and hidden[move.before != move.after].all():
            evidence = jax.tree.map(jnp.asarray, (state, inputs_before, inputs_after))
            return _witness(decider, move, before, after, differs, evidence)
    return None


def _shrink(decider, move):
    """A move with as few changed drafts as possible, mostly one.

    First the way from one block to the other is walked, draft by draft: decisions stay until they move, and the two
    blocks at that step differ in one draft, if the blocks between are possible. Then what can be restored is.
    """
    which = lambda blocks: np.full(len(blocks), move.chain)  # noqa: E731
    possible = lambda blocks: possible_blocks(decider.scenarios, which(blocks), blocks)  # noqa: E731

    def moves(blocks, base):
        differs = decider.decide_n(which(blocks), blocks) != base
        return differs.any(axis=1) if move.request is None else differs[:, move.request]

    base = decider.decide_n(*_one(move.chain, move.before))[0]
    path = _walk(move.before, move.after)
    path = path[possible(path)]
    moved = moves(path, base)
    if not moved.any():  # rounding, in another place of the batch; will not be confirmed
        return move
    turn = int(moved.argmax())
    before, after = path[turn - 1], path[turn]
    return move._replace(before=before, after=_keep_few(lambda c: moves(c, base) & possible(c), before, after))


def _walk(before, after):
    """Blocks from one to the other, one slot at a time, the last slots of a request first."""
    places = [(r, j) for r, j in np.argwhere(before != after)[::-1]]
    path = np.repeat(before[None], len(places) + 1, axis=0)
    for step, place in enumerate(places):
        path[step + 1 :, *place] = after[tuple(place)]
    return path


def _keep_few(moves, before, after):
    """Restores slots while the decision still moves."""
    while True:
        changed = before != after
        groups = [np.logical_and(changed, mask) for mask in _single_slots(changed)]
        if len(groups) < 2:
            return after
        alone = np.stack([np.where(group, after, before) for group in groups])
        restored = np.stack([np.where(group, before, after) for group in groups])
        candidates = np.concatenate([alone, restored])
        good = moves(candidates)
        if not good.any():
            return after
        # Of those that still move, the one that changes least; among equals the first.
        after = candidates[np.where(good, (candidates != before).sum(axis=(1, 2)), before.size + 1).argmin()]


def _single_slots(changed):
    """Masks with one of the changed slots each."""
    for place in np.argwhere(changed):
        mask = np.zeros_like(changed)
        mask[tuple(place)] = True
        yield mask


def _witness(decider, move, before, after, differs, evidence):
    """A `Witness`, about a request whose own drafts did not change where there is one."""
    changed = move.before != move.after
    strangers = differs & ~changed.any(axis=1)
    request = int((strangers if strangers.any() else differs).argmax())
    low, high = sorted((int(before[request]), int(after[request])))
    changes = tuple(
        Change(int(r), int(j) + 1, int(move.before[r, j]), int(move.after[r, j])) for r, j in np.argwhere(changed)
    )
    positions = tuple(range(low + 1, high + 1))
    direction = "from no to yes" if after[request] > before[request] else "from yes to no"
    place = f"position {positions[0]}" if len(positions) == 1 else f"positions {positions[0]} to {positions[-1]}"
    explanation = (
        f"verifying request {request} {place} changed {direction} when "
        f"{' and '.join(_change_in_words(decider, change) for change in changes)}; "
        f"{_revealed_in_words(decider, move, before, changes)}"
    )
    return Witness(request, positions, int(before[request]), int(after[request]), changes, explanation, *evidence)


def _change_in_words(decider, change):
    follows = decider.scheme.drafter == "autoregressive" and change.position < decider.scenarios.row_of.shape[2]
    law = f", and with it the draft law of position {change.position + 1}" if follows else ""
    where = f"draft token {change.position} of request {change.request}"
    return f"{where} changed from {change.before} to {change.after}{law}"


def _revealed_in_words(decider, move, before, changes):
    """What the decisions revealed of the requests that changed."""
    revealed = decider.num_revealed(np.array([move.chain]), before[None])[0]
    shown = {0: "none of its drafts", 1: "its draft 1 only"}
    parts = [
        f"of request {r} {shown.get(int(revealed[r]), f'its drafts 1 to {revealed[r]} only')}"
        for r in dict.fromkeys(change.request for change in changes)
    ]
    return f"the {decider.rule} rule reveals {' and '.join(parts)}"


def _one(chain, tokens):
    return np.array([chain]), tokens[None]


@functools.partial(jax.jit, static_argnames="decide")
def _decisions(decide, states, which, inputs):
    """(num_verified [N, B], states [N, ...]) of blocks in the states that `which` [N] names."""

    def one(chain, inputs):
        inputs = inputs._replace(survival=survival_probabilities(inputs.acceptance, inputs.num_drafts))
        num_verified, state = decide(jax.tree.map(lambda leaf: leaf[chain], states), inputs)
        return jnp.clip(num_verified, 0, inputs.num_drafts), state

    return jax.vmap(one)(which, inputs)


@functools.partial(jax.jit, static_argnames="decide")
def _decision(decide, states, chain, inputs):
    """(num_verified [B], the state it was decided in, survival) of one block."""
    state = jax.tree.map(lambda leaf: leaf[chain], states)
    inputs = inputs._replace(survival=survival_probabilities(inputs.acceptance, inputs.num_drafts))
    return jnp.clip(decide(state, inputs)[0], 0, inputs.num_drafts), state, inputs.survival
