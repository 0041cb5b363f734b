"""Counts of a decoding run: what was drafted, fed to the target, tested, accepted and emitted."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from specav.labels import Labels
from specav.verification import VerifyResult


class Statistics(NamedTuple):
    """Counts since the start.

    Attributes:
      rounds: int32 [B], rounds in which the request was active.
      emitted, drafted, verified, tested, accepted: int32 [B], tokens. Drafts count where they were drawn.
      impossible: int32 [B], tested drafts of draft probability 0 (a fault of the drafter; should be 0).
      verified_at, observed_at, accepted_at: int32 [K], per draft depth: drafts fed to the target, labels
        (tested, all earlier ones accepted), and accepted among these.
    """

    rounds: Int[Array, " B"]
    emitted: Int[Array, " B"]
    drafted: Int[Array, " B"]
    verified: Int[Array, " B"]
    tested: Int[Array, " B"]
    accepted: Int[Array, " B"]
    impossible: Int[Array, " B"]
    verified_at: Int[Array, " K"]
    observed_at: Int[Array, " K"]
    accepted_at: Int[Array, " K"]


def init(batch: int, width: int) -> Statistics:
    """Statistics of nothing, for `batch` requests and `width` draft positions."""
    row, column = jnp.zeros((batch,), jnp.int32), jnp.zeros((width,), jnp.int32)
    return Statistics(row, row, row, row, row, row, row, column, column, column)


def update(
    counts: Statistics,
    *,
    active: Bool[Array, " B"],
    num_new: Int[Array, " B"],
    num_verified: Int[Array, " B"],
    num_committed: Int[Array, " B"],
    depth: Int[Array, "B K"],
    result: VerifyResult,
    labels: Labels,
    impossible: Bool[Array, "B K"],
) -> Statistics:
    """Statistics after one more round; rows that are not active must have empty blocks and labels.

    Args:
      counts: so far.
      active: requests that took part.
      num_new: drafts drawn this round.
      num_verified: drafts fed to the target.
      num_committed: tokens committed.
      depth: each draft's 0-based position within the block it was drawn in.
      result: of the verification.
      labels: of the round.
      impossible: drafts of draft probability 0.
    """
    columns = jnp.broadcast_to(jnp.arange(depth.shape[1], dtype=jnp.int32), depth.shape)
    verified = columns < num_verified[:, None]
    tested = columns < result.num_tested[:, None]
    accepted = labels.observed & labels.accepted

    def per_request(mask):
        return jnp.sum(mask, axis=1, dtype=jnp.int32)

    def per_depth(mask):
        return jnp.zeros((depth.shape[1],), jnp.int32).at[depth].add(mask.astype(jnp.int32))

    return Statistics(
        rounds=counts.rounds + active.astype(jnp.int32),
        emitted=counts.emitted + num_committed,
        drafted=counts.drafted + num_new,
        verified=counts.verified + per_request(verified),
        tested=counts.tested + per_request(tested),
        accepted=counts.accepted + per_request(accepted),
        impossible=counts.impossible + per_request(tested & impossible),
        verified_at=counts.verified_at + per_depth(verified),
        observed_at=counts.observed_at + per_depth(labels.observed),
        accepted_at=counts.accepted_at + per_depth(accepted),
    )
