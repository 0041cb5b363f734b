"""A complete speculative decoding loop with adaptive verification, jitted from prefill to the last token.

The models are pure functions of the user, see `specav.drafting` for the contract. One round drafts, decides what to
verify (a `Policy`), runs the target on the last committed token and the drafts, verifies, commits, and teaches the
estimator what it saw. Target calls have the static shape [B, K+1]; how many of these rows are real is passed along.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from specav import policies, randomness, statistics
from specav._checks import one_of, shaped, static_int
from specav.decode_state import DecodeState, RoundInfo
from specav.drafting import DraftContext, Drafter, Model, features_of_drafts
from specav.estimators.base import AcceptanceEstimator
from specav.features import DraftFeatures, stack_features
from specav.labels import RULES, verification_labels
from specav.policies import Policy, PolicyInputs
from specav.sampling import SamplingParams, process_logits, sample
from specav.survival import survival_probabilities
from specav.verification import (
    DraftBlock,
    acceptance_probabilities,
    carry_over,
    speculative_verify,
)


class Decoder(NamedTuple):
    """A configured decoding loop, as pure functions.

    Attributes:
      init: (key, prompts int [B, P], prompt_lengths int [B], target_state, drafter_state, *, token_limits=None,
        estimator_state=None, policy_state=None) -> DecodeState; prefills both models.
      step: (DecodeState) -> (DecodeState, RoundInfo); one round for every request that is not finished.
      run: (DecodeState, *, max_rounds=None) -> DecodeState; `step` inside lax.while_loop until all are finished.
    """

    init: Callable[..., DecodeState]
    step: Callable[[DecodeState], tuple[DecodeState, RoundInfo]]
    run: Callable[..., DecodeState]


def speculative_decode(
    key: Array,
    prompts: Int[Array, "B P"],
    prompt_lengths: Int[Array, " B"],
    target: Model,
    target_state: Any,
    drafter: Drafter,
    drafter_state: Any,
    *,
    token_limits: Int[Array, " B"] | None = None,
    estimator_state: Any = None,
    max_rounds: int | None = None,
    **options: Any,
) -> DecodeState:
    """Decodes a batch of prompts to the end. Jittable; arrays and states may be traced, functions are static.

    Args:
      key: keys [B], one per request (then a request's tokens do not depend on its batch-mates or their order), or one.
      prompts: int [B, P], right-padded; prompt_lengths: int [B], each at least 1.
      target, target_state: the target model and its state (caches of at least P + max_new_tokens entries).
      drafter, drafter_state: the drafter and its state, e.g. `autoregressive_drafter(model)`.
      token_limits: int [B], new tokens per request, clamped to [0, max_new_tokens].
      estimator_state: a learned state to start from.
      max_rounds: stops after so many rounds; None: when all requests are finished.
      **options: of `decoder`.

    Returns:
      The final `DecodeState`: tokens [B, P + max_new_tokens] (prompt, then output, then -1), positions (total
      lengths), statistics, and every learned state.

    Raises:
      TypeError, ValueError: wrong shapes, names, or a policy that is not lossless under the rule.
    """
    loop = decoder(target, drafter, **options)
    state = loop.init(
        key,
        prompts,
        prompt_lengths,
        target_state,
        drafter_state,
        token_limits=token_limits,
        estimator_state=estimator_state,
    )
    return loop.run(state, max_rounds=max_rounds)


def decoder(
    target: Model,
    drafter: Drafter,
    *,
    num_draft_tokens: int,
    max_new_tokens: int,
    policy: Policy | None = None,
    estimator: AcceptanceEstimator | None = None,
    rule: str = "coupled",
    refill: str = "block",
    sampling: SamplingParams = SamplingParams(),
    draft_sampling: SamplingParams | None = None,
    eos_token: int | None = None,
    feature_names: tuple[str, ...] = (),
    require_lossless: bool = True,
) -> Decoder:
    """Configures a decoding loop.

    Args:
      target, drafter: see the module's docstring and `Drafter`.
      num_draft_tokens: K, drafts per round at most. A request close to its limit gets fewer.
      max_new_tokens: output room per request.
      policy: what to verify; default everything.
      estimator: predicts acceptance and learns from every round; default: raw max q, which learns nothing.
      rule: "standard", "coupled" or "deferred".
      refill: deferred rule only. "block": an exhausted block draws its bonus before anything is redrafted, which makes
        the output bitwise that of verifying everything; "eager": untested drafts are topped up to K every round,
        which is equal in law only.
      sampling: how target logits become the target law; draft_sampling: the same for the draft, default `sampling`.
      eos_token: ends a request; it is emitted, nothing after it is.
      feature_names: features to compute for `RoundInfo` and the policy beside the estimator's own.
      require_lossless: refuse a policy that may bend the output law under `rule` (the default).

    Returns:
      A `Decoder`.

    Raises:
      ValueError: an unknown rule or refill, or a combination that is not lossless; the message names the offender.
    """
    width = static_int("num_draft_tokens", num_draft_tokens, 1)
    room = static_int("max_new_tokens", max_new_tokens, 1)
    one_of("rule", rule, RULES)
    one_of("refill", refill, ("block", "eager"))
    policy = policies.everything() if policy is None else policy
    draft_sampling = sampling if draft_sampling is None else draft_sampling
    estimator_features = ("logit_q_max",) if estimator is None else estimator.features
    if require_lossless:
        policies.require_lossless(
            policy,
            rule,
            acceptance_depends_on="prefix" if estimator is None else estimator.depends_on,
            drafter=drafter.kind,
        )
    wanted = {*estimator_features, *feature_names, *(r for r in policy.reads if r in DraftFeatures._fields)}
    names = tuple(name for name in DraftFeatures._fields if name in wanted)
    deferred = rule == "deferred"

    def init(
        key,
        prompts,
        prompt_lengths,
        target_state,
        drafter_state,
        *,
        token_limits=None,
        estimator_state=None,
        policy_state=None,
    ):
        dims: dict[str, Any] = {}
        prompts = shaped(dims, "prompts", prompts, "B P", "int").astype(jnp.int32)
        batch, prompt_width = prompts.shape
        lengths = shaped(dims, "prompt_lengths", prompt_lengths, "B", "int").astype(jnp.int32)
        lengths = jnp.clip(lengths, 1, prompt_width)
        limits = jnp.full((batch,), room, jnp.int32)
        if token_limits is not None:
            limits = jnp.clip(shaped(dims, "token_limits", token_limits, "B", "int").astype(jnp.int32), 0, room)
        inside = jnp.broadcast_to(jnp.arange(prompt_width, dtype=jnp.int32), prompts.shape) < lengths[:, None]
        tokens = jnp.where(inside, prompts, -1)
        tokens = jnp.concatenate([tokens, jnp.full((batch, room), -1, jnp.int32)], axis=1)
        clean = jnp.where(inside, prompts, 0)
        zero = jnp.zeros((batch,), jnp.int32)
        _, target_state = target(target_state, clean, zero, lengths)
        drafter_state = drafter.prefill(drafter_state, clean, lengths)
        state = DecodeState(
            keys=randomness.request_keys(key, batch),
            tokens=tokens,
            positions=lengths,
            limits=lengths + limits,
            finished=limits <= 0,
            kept=DraftBlock(
                tokens=jnp.full((batch, width), -1, jnp.int32),
                logits=None,
                num_drafts=zero,
                origin=jnp.zeros((batch, width), jnp.int32),
            ),
            owes_bonus=jnp.zeros((batch,), jnp.bool_),
            last_accepted=zero,
            last_tested=zero,
            target=target_state,
            drafter=drafter_state,
            estimator=_initial(estimator, estimator_state),
            policy=policy.init() if policy_state is None else policy_state,
            statistics=statistics.init(batch, width),
        )
        if not deferred:
            return state
        # Kept drafts carry their laws, features and predictions: shapes as the first round will make them.
        block = jax.eval_shape(lambda s: _draft(s)[1], state)
        empty = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), block)
        return state._replace(kept=empty._replace(tokens=state.kept.tokens))

    def step(state):
        active = ~state.finished
        drafter_state, block = _draft(state)
        features, acceptance = block.extras
        survival = survival_probabilities(acceptance, block.num_drafts)
        num_new = block.num_drafts - state.kept.num_drafts
        inputs = PolicyInputs(
            features=features,
            draft_tokens=block.tokens,
            num_drafts=block.num_drafts,
            acceptance=acceptance,
            survival=survival,
            active=active,
            num_drafting=jnp.sum(num_new > 0, dtype=jnp.int32),  # kept drafts cost nothing to draft
            last_accepted=state.last_accepted,
            last_tested=state.last_tested,
        )
        num_verified, policy_state = policy.decide(state.policy, inputs)
        num_verified = jnp.clip(num_verified, 0, block.num_drafts)

        last = jnp.take_along_axis(state.tokens, state.positions[:, None] - 1, axis=1)
        fed = jnp.maximum(jnp.concatenate([last, block.tokens], axis=1), 0)
        num_fed = jnp.where(active, num_verified + 1, 0)
        logits, target_state = target(state.target, fed, state.positions - 1, num_fed)
        logits = process_logits(logits, sampling)
        result = speculative_verify(
            state.keys,
            block.tokens,
            block.logits,
            logits,
            block.num_drafts,
            num_verified,
            rule="coupled" if deferred else rule,
            positions=state.positions,
        )

        # EOS truncates emission, labels and what is kept. (Limits never do: they already cap the drafts.)
        slots = jnp.broadcast_to(jnp.arange(width + 1, dtype=jnp.int32), result.tokens.shape)
        num_committed = result.num_emitted
        if eos_token is not None:
            first_eos = jnp.min(jnp.where(result.tokens == eos_token, slots, width + 1), axis=1)
            num_committed = jnp.minimum(num_committed, first_eos + 1)
        num_committed = jnp.where(active, num_committed, 0)
        labels = verification_labels(result.num_accepted, result.num_tested, width, num_labelled=num_committed)
        ended = state.positions + num_committed >= state.limits
        if eos_token is not None:
            ended = ended | (first_eos < result.num_emitted)
        finished = state.finished | ended

        depth = _depth(block, state.positions)
        estimator_state, refit = state.estimator, None
        if estimator is not None:
            stacked = stack_features(features, estimator_features)
            estimator_state, refit = estimator.step(estimator_state, stacked, acceptance, labels, depth=depth)

        kept, owes_bonus = state.kept, state.owes_bonus
        if deferred:
            kept = carry_over(block, result)
            kept = kept._replace(num_drafts=jnp.where(finished, 0, kept.num_drafts))
            exhausted = (kept.num_drafts == 0) & (result.num_emitted == result.num_accepted)
            owes_bonus = exhausted & ~finished if refill == "block" else owes_bonus

        where = jnp.where(slots < num_committed[:, None], state.positions[:, None] + slots, state.tokens.shape[1])
        tokens = jax.vmap(lambda row, at, new: row.at[at].set(new, mode="drop"))(state.tokens, where, result.tokens)
        true_acceptance = acceptance_probabilities(block.tokens, block.logits, logits, block.num_drafts)
        info = RoundInfo(
            active=active,
            positions=state.positions,
            block=block,
            depth=depth,
            features=features,
            acceptance=acceptance,
            num_verified=num_verified,
            target_logits=logits,
            result=result,
            num_committed=num_committed,
            labels=labels,
            true_acceptance=true_acceptance,
            refit=refit,
        )
        counts = statistics.update(
            state.statistics,
            active=active,
            num_new=num_new,
            num_verified=num_verified,
            num_committed=num_committed,
            depth=depth,
            result=result,
            labels=labels,
            impossible=true_acceptance.impossible,
        )
        return (
            state._replace(
                tokens=tokens,
                positions=state.positions + num_committed,
                finished=finished,
                kept=kept,
                owes_bonus=owes_bonus,
                last_accepted=result.num_accepted,
                last_tested=result.num_tested,
                target=target_state,
                drafter=drafter_state,
                estimator=estimator_state,
                policy=policy_state,
                statistics=counts,
            ),
            info,
        )

    def run(state, *, max_rounds=None):
        def unfinished(carry):
            state, rounds = carry
            more = jnp.any(~state.finished)
            return more if max_rounds is None else more & (rounds < max_rounds)

        def body(carry):
            state, rounds = carry
            return step(state)[0], rounds + 1

        return jax.lax.while_loop(unfinished, body, (state, jnp.zeros((), jnp.int32)))[0]

    def _draft(state):
        """Tops the kept drafts up; returns the drafter's state and the block with (features, predictions)."""
        kept = state.kept
        num_kept = kept.num_drafts
        # A round may emit one token more than there are drafts, hence limit - 1. Committed tokens alone decide.
        wanted = jnp.clip(state.limits - state.positions - 1, 0, width)
        if refill == "block":
            wanted = jnp.where((num_kept > 0) | state.owes_bonus, num_kept, wanted)
        num_new = jnp.where(state.finished, 0, jnp.maximum(wanted - num_kept, 0))
        lengths = state.positions + num_kept
        sequence = _append(state.tokens, kept.tokens, state.positions, num_kept)
        draw_keys = state.keys

        def draw(logits, index):
            position = lengths + index
            keys = randomness.draft_keys(draw_keys, position, state.positions)
            return sample(keys, process_logits(logits, draft_sampling))

        new_tokens, raw, drafter_state = drafter.propose(state.drafter, DraftContext(sequence, lengths, num_new), draw)
        new_tokens = shaped({}, "drafter.propose tokens", new_tokens, f"{lengths.shape[0]} {width}", "int")
        columns = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), new_tokens.shape)
        num_drafts = num_kept + num_new
        is_new = (columns >= num_kept[:, None]) & (columns < num_drafts[:, None])
        source = jnp.clip(columns - num_kept[:, None], 0, width - 1)

        def merge(old, new):
            """Kept columns first, then the new ones."""
            if deferred:
                new = jax.vmap(lambda values, index: values[index])(new, source)
            mask = is_new.reshape(is_new.shape + (1,) * (new.ndim - 2))
            return jnp.where(mask, new, jnp.zeros_like(new) if old is None else old)

        tokens = merge(kept.tokens, new_tokens.astype(jnp.int32))
        tokens = jnp.where(columns < num_drafts[:, None], tokens, -1)
        origin = merge(kept.origin, jnp.broadcast_to(state.positions[:, None], columns.shape))
        raw_features, law_logits = features_of_drafts(raw, new_tokens, draft_sampling, names)
        old_features = None if kept.extras is None else kept.extras[0]
        features = jax.tree.map(merge, old_features, raw_features) if old_features else raw_features
        block = DraftBlock(
            tokens=tokens,
            logits=None if law_logits is None else merge(kept.logits, law_logits),
            num_drafts=num_drafts,
            origin=origin,
        )
        predicted = _predict(state.estimator, features, _depth(block, state.positions))
        acceptance = predicted if kept.extras is None else jnp.where(is_new, predicted, kept.extras[1])
        return drafter_state, block._replace(extras=(features, acceptance))

    def _predict(estimator_state, features, depth):
        stacked = stack_features(features, estimator_features)
        if estimator is None:
            return jax.nn.sigmoid(stacked)
        return estimator.predict(estimator_state, stacked, depth=depth)

    return Decoder(init, step, run)


def _initial(estimator, state):
    """The estimator's state to start from; None without an estimator."""
    if estimator is None:
        return None
    return estimator.init() if state is None else state


def _depth(block, positions):
    """Each draft's 0-based position within the block it was drawn in: absolute position minus origin."""
    width = block.tokens.shape[1]
    columns = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), block.tokens.shape)
    return jnp.clip(positions[:, None] + columns - block.origin, 0, width - 1)


def _append(tokens, kept, positions, num_kept):
    """The committed tokens with the kept drafts written behind them."""
    columns = jnp.broadcast_to(jnp.arange(kept.shape[1], dtype=jnp.int32), kept.shape)
    where = jnp.where(columns < num_kept[:, None], positions[:, None] + columns, tokens.shape[1])
    return jax.vmap(lambda row, at, new: row.at[at].set(new, mode="drop"))(tokens, where, kept)
