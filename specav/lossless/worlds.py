"""Everything that may have happened so far in a decoding run, with its probability: the rows of an exact enumeration.

A `Worlds` holds one row per distinguishable history, as columns. Two histories that agree in everything that the future
depends on are one row (`merge`). States of the policy and the estimator are bytes in a table, referred to by number,
so that rows are cheap to copy and states are compared bit for bit. Float64 NumPy throughout.
"""

from typing import NamedTuple

import numpy as np


class Block(NamedTuple):
    """Drafts of N worlds, R requests, K slots, kept ones first; empty slots hold token -1 and zeros.

    Attributes:
      tokens: int32 [N, R, K].
      num_drafts: int32 [N, R], drafts drawn and not yet tested.
      num_new: int32 [N, R], those drawn in this round.
      laws: float64 [N, R, K, V], the laws that the verifier takes them to be drawn from.
      features: float32 [N, R, K, F].
      acceptance: float32 [N, R, K], the estimator's predictions at draft time.
      origin: int32 [N, R, K], tokens emitted when the draft was drawn.
    """

    tokens: np.ndarray
    num_drafts: np.ndarray
    num_new: np.ndarray
    laws: np.ndarray
    features: np.ndarray
    acceptance: np.ndarray
    origin: np.ndarray


class Worlds(NamedTuple):
    """N histories of batches of R requests; n is the number of tokens that are followed.

    Attributes:
      batch: int32 [N], which batch of prompts it belongs to.
      weight: float64 [N], probability.
      tokens: int32 [N, R, n], emitted tokens, -1 beyond.
      lengths: int32 [N, R], number of emitted tokens, at most n; a request with n is finished.
      block: the drafts.
      num_verified: int32 [N, R], drafts fed to the target in this round.
      last_accepted, last_tested: int32 [N, R], verdicts of the last round that was judged.
      owes_bonus: bool [N, R], a block that was accepted to its end and whose bonus comes before new drafts.
      policy_state, estimator_state: int64 [N], rows of tables uint8 [S, bytes].
    """

    batch: np.ndarray
    weight: np.ndarray
    tokens: np.ndarray
    lengths: np.ndarray
    block: Block
    num_verified: np.ndarray
    last_accepted: np.ndarray
    last_tested: np.ndarray
    owes_bonus: np.ndarray
    policy_state: np.ndarray
    estimator_state: np.ndarray

    @property
    def active(self) -> np.ndarray:
        """Requests still decoding, bool [N, R]."""
        return self.lengths < self.tokens.shape[-1]


class Tables(NamedTuple):
    """The states that `policy_state` and `estimator_state` refer to, uint8 [S, bytes] each."""

    policy: np.ndarray
    estimator: np.ndarray


def first_worlds(num_batches: int, num_requests: int, num_tokens: int, width: int, vocabulary: int, num_features: int):
    """One world per batch, before the first round; states are row 0 of their tables."""
    rows = (num_batches, num_requests)
    zero = np.zeros(rows, np.int32)
    return Worlds(
        batch=np.arange(num_batches, dtype=np.int32),
        weight=np.ones(num_batches),
        tokens=np.full((*rows, num_tokens), -1, np.int32),
        lengths=zero,
        block=empty_block(rows, width, vocabulary, num_features),
        num_verified=zero,
        last_accepted=zero,
        last_tested=zero,
        owes_bonus=np.zeros(rows, np.bool_),
        policy_state=np.zeros(num_batches, np.int64),
        estimator_state=np.zeros(num_batches, np.int64),
    )


def empty_block(rows: tuple[int, int], width: int, vocabulary: int, num_features: int) -> Block:
    """A `Block` without drafts for [N, R] rows."""
    zero = np.zeros(rows, np.int32)
    return Block(
        tokens=np.full((*rows, width), -1, np.int32),
        num_drafts=zero,
        num_new=zero,
        laws=np.zeros((*rows, width, vocabulary)),
        features=np.zeros((*rows, width, num_features), np.float32),
        acceptance=np.zeros((*rows, width), np.float32),
        origin=np.zeros((*rows, width), np.int32),
    )


def take(worlds: Worlds, rows) -> Worlds:
    """The worlds at `rows` (indices or a mask: copies that may be written to; a slice: views)."""
    columns = {name: column[rows] for name, column in worlds._asdict().items() if name != "block"}
    return Worlds(block=Block(*(column[rows] for column in worlds.block)), **columns)


def branch(worlds: Worlds, probabilities: np.ndarray) -> tuple[Worlds, np.ndarray, np.ndarray]:
    """Splits every world over choices 0..C-1 of the given probabilities; impossible choices make no row.

    Args:
      worlds: N rows.
      probabilities: float64 [N, C].

    Returns:
      (worlds with their new weights, their row before, their choice).
    """
    rows, choice = np.nonzero(probabilities)
    split = take(worlds, rows)
    return split._replace(weight=split.weight * probabilities[rows, choice]), rows, choice


def merge(worlds: Worlds) -> Worlds:
    """Adds up worlds that agree in everything but their weight, as they stand between two rounds."""
    if not len(worlds.weight):
        return worlds
    columns = [column for name, column in worlds._asdict().items() if name not in ("weight", "block")]
    if worlds.block.num_drafts.any():
        columns += list(worlds.block)
    first, inverse = distinct_rows(columns)
    merged = take(worlds, first)
    return merged._replace(weight=np.bincount(inverse, worlds.weight, minlength=len(first)))


def join(parts: list[tuple[Worlds, Tables]]) -> tuple[Worlds, Tables]:
    """Worlds of several origins, with their tables of states made one."""
    if len(parts) == 1:
        return parts[0]
    sizes = np.cumsum([[0, 0]] + [[len(t.policy), len(t.estimator)] for _, t in parts], axis=0)
    columns = [
        w._replace(policy_state=w.policy_state + p, estimator_state=w.estimator_state + e)
        for (w, _), (p, e) in zip(parts, sizes, strict=False)
    ]
    blocks = Block(*(np.concatenate(c) for c in zip(*(w.block for w in columns), strict=True)))
    fields = {f: np.concatenate([getattr(w, f) for w in columns]) for f in Worlds._fields if f != "block"}
    policy, policy_row = distinct_states(np.concatenate([t.policy for _, t in parts]))
    estimator, estimator_row = distinct_states(np.concatenate([t.estimator for _, t in parts]))
    fields["policy_state"] = policy_row[fields["policy_state"]]
    fields["estimator_state"] = estimator_row[fields["estimator_state"]]
    return Worlds(block=blocks, **fields), Tables(policy, estimator)


def distinct_states(states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct rows of a table uint8 [S, bytes], and for every row its number among them."""
    if states.shape[1] == 0:
        return states[:1], np.zeros(len(states), np.int64)
    first, inverse = distinct_rows([states])
    return states[first], inverse


def distinct_rows(columns: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Which rows of a table are equal, bit for bit.

    Rows are sorted by a hash of 64 bits; every row is then compared with the one that stands for it.

    Args:
      columns: arrays [N, ...] of any dtypes; row i consists of their entries i.

    Returns:
      (first int [D], a row for each distinct one; inverse int [N], which of these a row equals).
    """
    words = _as_words(columns)
    digest = np.zeros(len(words), np.uint64)
    for column in words.T:
        digest = (digest ^ column) * np.uint64(0x9E3779B97F4A7C15)
        digest ^= digest >> np.uint64(29)
    _, first, inverse = np.unique(digest, return_index=True, return_inverse=True)
    inverse = inverse.reshape(-1)
    if not np.array_equal(words[first[inverse]], words):  # two rows share a hash
        _, first, inverse = np.unique(words, axis=0, return_index=True, return_inverse=True)
    return first, inverse.reshape(-1)


def _as_words(columns):
    """The bytes of each row, padded, as uint64 [N, words]."""
    count = len(columns[0])
    parts = []
    for column in columns:
        flat = np.ascontiguousarray(column).reshape(count, -1)
        if flat.shape[1]:
            parts.append(flat.view(np.uint8).reshape(count, -1))
    size = sum(part.shape[1] for part in parts)
    padding = np.zeros((count, -size % 8), np.uint8)
    return np.ascontiguousarray(np.concatenate([*parts, padding], axis=1)).view(np.uint64)
