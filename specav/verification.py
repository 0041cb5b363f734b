"""Verification of draft tokens: which are accepted, and which token the target adds, without changing its law.

Three rules (the words are those of the README):

* standard: test x_1..x_n; a rejection emits a residual token, and if all pass a bonus token comes from row n+1.
* coupled: feeding n drafts yields n+1 target rows; the last row *tests* draft n+1 instead of drawing a bonus. The
  bonus comes from row K_r+1 only when n = K_r. Same number of emitted tokens for equal n, one more label.
* deferred: the coupled rule, and drafts that were not tested are kept for the next round: `speculative_verify` with
  rule "coupled", then `carry_over`.

Acceptance is tested with probability a = min(1, p(x) / q(x)), and the residual law is proportional to max(p - q, 0).

References:
  Leviathan et al., Fast Inference from Transformers via Speculative Decoding, ICML 2023.
  Chen et al., Accelerating Large Language Model Decoding with Speculative Sampling, 2023.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specav import randomness
from specav._checks import one_of, shaped
from specav.labels import num_tested_drafts
from specav.sampling import law, token_probability


class VerifyResult(NamedTuple):
    """What one round of verification emitted.

    Attributes:
      tokens: int32 [B, K+1], the emitted tokens (accepted drafts, then at most one token of the target), padded -1.
      num_emitted: int32 [B], 1..K+1: every round emits at least one token per request.
      num_accepted: int32 [B], drafts accepted. num_emitted - 1, or equal to it when the free row of the coupled
        rule accepted the last tested draft.
      num_tested: int32 [B], drafts put to the test: n (standard), min(n + 1, K_r) (coupled).
    """

    tokens: Int[Array, "B K1"]
    num_emitted: Int[Array, " B"]
    num_accepted: Int[Array, " B"]
    num_tested: Int[Array, " B"]


class Acceptance(NamedTuple):
    """The acceptance probabilities that the verifier knows exactly, and drafts that cannot be.

    Attributes:
      token: float32 [B, K], a_i = min(1, p_i(x_i) / q_i(x_i)); 0 where the draft is impossible or empty.
      prefix: float32 [B, K], alpha_i = sum_x min(p_i(x), q_i(x)) = 1 - TV(p_i, q_i) = E[a_i | x_<i].
      impossible: bool [B, K], drafts with q_i(x_i) = 0: a fault of the caller (the draft was not drawn from the law
        that was handed in). They count as rejected.
    """

    token: Float[Array, "B K"]
    prefix: Float[Array, "B K"]
    impossible: Bool[Array, "B K"]


class DraftBlock(NamedTuple):
    """Drafts of a round, kept ones first.

    Attributes:
      tokens: int32 [B, K], padded with -1.
      logits: float [B, K, V], the processed logits each draft was drawn from; None for point-mass drafts.
      num_drafts: int32 [B], every token drawn and not yet tested; trimming never lowers it.
      origin: int32 [B, K], tokens committed when the draft was drawn. Its *depth* (the intercept and label it
        belongs to) is its absolute position minus its origin.
      extras: pytree of arrays [B, K, ...] that belong to the drafts: features, predictions made at draft time.
    """

    tokens: Int[Array, "B K"]
    logits: Float[Array, "B K V"] | None
    num_drafts: Int[Array, " B"]
    origin: Int[Array, "B K"]
    extras: Any = None


def speculative_verify(
    key: Array,
    draft_tokens: Int[Array, "B K"],
    draft_logits: Float[Array, "B K V"] | None,
    target_logits: Float[Array, "B K1 V"],
    num_drafts: Int[Array, " B"],
    num_verified: Int[Array, " B"],
    *,
    rule: str = "coupled",
    positions: Int[Array, " B"] | None = None,
) -> VerifyResult:
    """Tests drafts against the target and emits tokens that follow the target's law exactly.

    The law is exact whatever decided `num_verified`, as long as that decision kept to what the rule allows
    (`specav.policies.require_lossless`). "Exact" means in real arithmetic on the float32 laws; there is no epsilon.
    Laws are computed in float32 from the logits as given (`specav.sampling.law`).

    Args:
      key: keys [B], one distinct key per request, with `positions`; or one key, folded by row (a convenience without
        the guarantees about batch-mates and order).
      draft_tokens: int [B, K].
      draft_logits: float [B, K, V], the processed logits the drafts were drawn from; None if each draft is a point
        mass (argmax, n-gram lookup), which is then accepted with probability p(x).
      target_logits: float [B, K+1, V], processed (`specav.sampling.process_logits`); row i judges draft i+1, and only
        rows 0..num_verified are read. Greedy rows are one-hot (0 and -inf).
      num_drafts: int [B], drafts that each request really has, clamped to [0, K].
      num_verified: int [B], drafts that were fed to the target, clamped to [0, num_drafts].
      rule: "standard" or "coupled". For the deferred rule use "coupled" and `carry_over`.
      positions: int [B], tokens committed so far, the absolute index of the first draft. Default 0, which repeats
        noise from round to round unless the key changes.

    Returns:
      A `VerifyResult`. A drafted token outside 0..V-1 or of draft probability 0 is rejected. When the residual
      vanishes in float32, the token is drawn from the target row itself. A target row without a finite logit names
      no law: its draft is rejected and token 0 emitted.

    Raises:
      TypeError, ValueError: wrong shapes, dtypes or rule.

    References:
      Leviathan et al. 2023, algorithm 1 (standard rule). The coupled rule tests draft n+1 where algorithm 1 draws
      a bonus token.
    """
    one_of("rule", rule, ("standard", "coupled"))
    dims: dict[str, Any] = {}
    draft_tokens = shaped(dims, "draft_tokens", draft_tokens, "B K", "int").astype(jnp.int32)
    batch, width = draft_tokens.shape
    target_logits = shaped(dims, "target_logits", target_logits, f"B {width + 1} V", "float")
    if draft_logits is not None:
        draft_logits = shaped(dims, "draft_logits", draft_logits, "B K V", "float")
    num_drafts = jnp.clip(shaped(dims, "num_drafts", num_drafts, "B", "int").astype(jnp.int32), 0, width)
    num_verified = shaped(dims, "num_verified", num_verified, "B", "int").astype(jnp.int32)
    num_verified = jnp.clip(num_verified, 0, num_drafts)
    if positions is None:
        positions = jnp.zeros((batch,), jnp.int32)
    positions = shaped(dims, "positions", positions, "B", "int").astype(jnp.int32)
    keys = randomness.request_keys(key, batch)

    # Which drafts pass. Row i of the target judges draft i.
    num_tested = num_tested_drafts(num_verified, num_drafts, rule)
    accept = _token_acceptance(draft_tokens, draft_logits, target_logits)
    columns = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (batch, width))
    absolute = positions[:, None] + columns
    accept_keys = randomness.verdict_keys(_per_column(keys, width), absolute, randomness.ACCEPT)
    passed = jax.vmap(jax.vmap(randomness.bernoulli))(accept_keys, accept)
    passed = passed & (columns < num_tested[:, None])
    num_accepted = jnp.sum(jnp.cumprod(passed.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)

    # The token the target adds: residual at the first rejection, bonus after the last row if that row tested nothing.
    rejected = num_accepted < num_tested
    has_bonus = ~rejected & (num_tested == num_verified)
    row = num_accepted  # the rejected draft's row, or the row after the last tested draft
    target_row = law(_take_row(target_logits, row))
    weights = jnp.where(rejected[:, None], _residual(draft_tokens, draft_logits, target_row, row), target_row)
    purpose = jnp.where(rejected, randomness.RESIDUAL, randomness.BONUS)
    added_keys = randomness.verdict_keys(keys, positions + row, purpose)
    added = jax.vmap(randomness.categorical)(added_keys, weights)
    num_emitted = num_accepted + (rejected | has_bonus).astype(jnp.int32)

    slots = jnp.broadcast_to(jnp.arange(width + 1, dtype=jnp.int32), (batch, width + 1))
    padded = jnp.concatenate([draft_tokens, jnp.full((batch, 1), -1, jnp.int32)], axis=1)
    tokens = jnp.where(slots < num_accepted[:, None], padded, added[:, None])
    tokens = jnp.where(slots < num_emitted[:, None], tokens, -1)
    return VerifyResult(tokens, num_emitted, num_accepted, num_tested)


def acceptance_probabilities(
    draft_tokens: Int[Array, "B K"],
    draft_logits: Float[Array, "B K V"] | None,
    target_logits: Float[Array, "B K1 V"],
    num_drafts: Int[Array, " B"] | None = None,
) -> Acceptance:
    """The exact acceptance probabilities a_i and alpha_i: soft labels, and the ceilings of every estimator.

    Args:
      draft_tokens: int [B, K].
      draft_logits: float [B, K, V] processed logits of the drafts, or None for point masses (then alpha_i = a_i).
      target_logits: float [B, K, V] or [B, K+1, V]; rows from the first K.
      num_drafts: int [B]; slots beyond it get 0 and are not impossible. Default: all K.

    Returns:
      An `Acceptance`. Whether a slot's target row was computed (num_verified) is the caller's to know.

    Raises:
      TypeError, ValueError: wrong shapes or dtypes.
    """
    dims: dict[str, Any] = {}
    draft_tokens = shaped(dims, "draft_tokens", draft_tokens, "B K", "int").astype(jnp.int32)
    batch, width = draft_tokens.shape
    target_logits = shaped(dims, "target_logits", target_logits, "B T V", "float")
    if target_logits.shape[1] not in (width, width + 1):
        raise ValueError(
            f"target_logits: expected shape [B={batch}, {width} or {width + 1}, V], got {list(target_logits.shape)}"
        )
    target_logits = target_logits[:, :width]
    valid = jnp.ones((batch, width), jnp.bool_)
    if num_drafts is not None:
        num_drafts = shaped(dims, "num_drafts", num_drafts, "B", "int").astype(jnp.int32)
        valid = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (batch, width)) < num_drafts[:, None]
    in_vocabulary = (draft_tokens >= 0) & (draft_tokens < target_logits.shape[-1])
    token = jnp.where(valid, _token_acceptance(draft_tokens, draft_logits, target_logits), 0.0)
    if draft_logits is None:
        return Acceptance(token, token, valid & ~in_vocabulary)
    draft_logits = shaped(dims, "draft_logits", draft_logits, "B K V", "float")
    prefix = jnp.sum(jnp.minimum(law(draft_logits), law(target_logits)), axis=-1)
    prefix = jnp.where(valid, jnp.minimum(prefix, 1.0), 0.0)
    impossible = valid & ~(token_probability(draft_logits, draft_tokens) > 0)
    return Acceptance(token, prefix, impossible)


def carry_over(block: DraftBlock, result: VerifyResult) -> DraftBlock:
    """What the deferred rule keeps for the next round: the drafts that were not tested, moved to the front.

    A rejection discards them all. Tokens, laws, origins and extras (features, draft-time predictions) move together;
    survival restarts at the first kept draft. To finish a request set its num_drafts to 0.

    Args:
      block: the drafts of this round.
      result: of `speculative_verify(..., rule="coupled")` on them.

    Returns:
      A `DraftBlock` of the same shapes; empty slots hold token -1 and zeros.

    Raises:
      TypeError, ValueError: wrong shapes or dtypes.
    """
    dims: dict[str, Any] = {}
    tokens = shaped(dims, "block.tokens", block.tokens, "B K", "int")
    num_drafts = shaped(dims, "block.num_drafts", block.num_drafts, "B", "int")
    num_accepted = shaped(dims, "result.num_accepted", result.num_accepted, "B", "int")
    num_tested = shaped(dims, "result.num_tested", result.num_tested, "B", "int")
    batch, width = tokens.shape
    kept = jnp.where(num_accepted == num_tested, num_drafts - num_tested, 0)
    columns = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (batch, width))
    source = jnp.minimum(columns + num_tested[:, None], width - 1)
    is_kept = columns < kept[:, None]

    def shift(leaf, fill=0):
        moved = jax.vmap(lambda values, index: values[index])(leaf, source)
        mask = is_kept.reshape(is_kept.shape + (1,) * (leaf.ndim - 2))
        return jnp.where(mask, moved, jnp.asarray(fill, leaf.dtype))

    return DraftBlock(
        tokens=shift(tokens, -1),
        logits=None if block.logits is None else shift(block.logits),
        num_drafts=kept.astype(jnp.int32),
        origin=shift(block.origin),
        extras=jax.tree.map(shift, block.extras),
    )


def _token_acceptance(draft_tokens, draft_logits, target_logits):
    """a = min(1, p(x) / q(x)) per slot; 0 where q(x) = 0 or x is no token."""
    p = token_probability(target_logits[:, : draft_tokens.shape[1]], draft_tokens)
    if draft_logits is None:
        return p
    q = token_probability(draft_logits, draft_tokens)
    return jnp.where(q > 0, jnp.minimum(p / jnp.where(q > 0, q, 1.0), 1.0), 0.0)


def _residual(draft_tokens, draft_logits, target_row, row):
    """Weights of max(p - q, 0) in the rejected row; p itself where they vanish by rounding."""
    last = draft_tokens.shape[1] - 1
    if draft_logits is None:
        token = jnp.take_along_axis(draft_tokens, jnp.minimum(row, last)[:, None], axis=1)
        draft_row = jax.nn.one_hot(token[:, 0], target_row.shape[-1], dtype=jnp.float32)
    else:
        draft_row = law(_take_row(draft_logits, jnp.minimum(row, last)))
    weights = jnp.maximum(target_row - draft_row, 0.0)
    vanished = ~(jnp.max(weights, axis=-1, keepdims=True) > 0)
    return jnp.where(vanished, target_row, weights)


def _take_row(logits, row):
    """logits[b, row[b]], [B, V]."""
    return jnp.take_along_axis(logits, row[:, None, None], axis=1)[:, 0]


def _per_column(keys, width):
    """Request keys [B] repeated to [B, K]."""
    return jnp.broadcast_to(keys[:, None], (keys.shape[0], width))
