"""What a decoding loop carries from round to round, and what it tells about one: the types of `specav.decode`."""

from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float, Int

from specav.features import DraftFeatures
from specav.labels import Labels
from specav.statistics import Statistics
from specav.verification import Acceptance, DraftBlock, VerifyResult


class DecodeState(NamedTuple):
    """Everything a decoding run carries from round to round.

    Attributes:
      keys: typed keys [B].
      tokens: int32 [B, L], prompt then output, -1 beyond.
      positions: int32 [B], tokens committed (prompt + output).
      limits: int32 [B], value of `positions` at which a request ends.
      finished: bool [B].
      kept: the drafts kept by the deferred rule (num_drafts 0 under the others).
      owes_bonus: bool [B], an exhausted block that has to draw its bonus in a round without drafts.
      last_accepted, last_tested: int32 [B], verdicts of the previous round, 0 before the first.
      target, drafter, estimator, policy: their states.
      statistics: counts.
    """

    keys: Array
    tokens: Int[Array, "B L"]
    positions: Int[Array, " B"]
    limits: Int[Array, " B"]
    finished: Bool[Array, " B"]
    kept: DraftBlock
    owes_bonus: Bool[Array, " B"]
    last_accepted: Int[Array, " B"]
    last_tested: Int[Array, " B"]
    target: Any
    drafter: Any
    estimator: Any
    policy: Any
    statistics: Statistics


class RoundInfo(NamedTuple):
    """What happened in one round; what is not used costs nothing under jit.

    Attributes:
      active: bool [B], requests that took part.
      positions: int32 [B], tokens committed before the round.
      block: the drafts, kept ones first; block.logits are processed (the law they were drawn from).
      depth: int32 [B, K], each draft's position within the block it was drawn in (0-based).
      features: DraftFeatures [B, K].
      acceptance: float32 [B, K], predictions made at draft time.
      num_verified: int32 [B].
      target_logits: float32 [B, K+1, V], processed; rows 0..num_verified are the target's, the rest means nothing.
      result: VerifyResult, before EOS truncation.
      num_committed: int32 [B], tokens committed by this round.
      labels: Labels [B, K].
      true_acceptance: Acceptance [B, K], a_i and alpha_i; meaningful where a target row was fed (i <= num_verified).
      refit: the estimator's info, or None.
    """

    active: Bool[Array, " B"]
    positions: Int[Array, " B"]
    block: DraftBlock
    depth: Int[Array, "B K"]
    features: DraftFeatures
    acceptance: Float[Array, "B K"]
    num_verified: Int[Array, " B"]
    target_logits: Float[Array, "B K1 V"]
    result: VerifyResult
    num_committed: Int[Array, " B"]
    labels: Labels
    true_acceptance: Acceptance
    refit: Any
