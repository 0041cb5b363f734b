"""Policies that stop at the first unsure draft of a request: published stopping rules, and how they are told apart.

The point that decides about losslessness is small. A rule that looks at draft i and then *discards* it lets x_i decide
about its own verification; a rule that looks at draft i, *keeps* it and stops afterwards does not. `threshold`
discards, `stop_after` keeps.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from specav._checks import one_of, static_float, static_int
from specav.features import FEATURES
from specav.policies.base import Policy, by_slots, last_verdicts, read_input, usable_drafts
from specav.survival import valid_slots

_READABLE = (*FEATURES, "acceptance", "survival")


class AdaptiveThresholdState(NamedTuple):
    """State of `draft_and_verify`.

    Attributes:
      threshold: float32 [R], in probability; R = 1 or one per request.
      acceptance: float32 [R], running mean of the share of drafts accepted.
    """

    threshold: Float[Array, " R"]
    acceptance: Float[Array, " R"]


def threshold(feature_name: str, minimum: float) -> Policy:
    """Verifies the longest prefix of drafts whose values are all at least a minimum: n = max{i: f_1..f_i >= minimum}.

    The first draft below is discarded. Depends on the class of the feature at positions <= i: on `logit_q_max` it is
    Kangaroo's confidence rule (Liu et al., 2024), on `logit_q_sampled` it is lossless under the coupled rule only. NaN
    fails.

    Args:
      feature_name: a name of `FEATURES`, "acceptance" or "survival".
      minimum: in the feature's units.

    Raises:
      TypeError, ValueError: unknown name, or NaN.
    """
    one_of("feature_name", feature_name, _READABLE)
    minimum = static_float("minimum", minimum, -float("inf"))
    name = f"threshold({feature_name} >= {minimum:g})"

    def slots(state, inputs):
        return _leading(read_input(name, inputs, feature_name) >= minimum, inputs), state

    return by_slots(name, slots, reads=(feature_name,), couples="none", window="causal")


def survival_threshold(minimum: float) -> Policy:
    """Verifies drafts while S_i >= minimum. Depends on the estimator's class at positions <= i.

    Raises:
      TypeError, ValueError: `minimum` is not a number in [0, 1].
    """
    policy = threshold("survival", static_float("minimum", minimum, 0.0, 1.0))
    return policy._replace(name=f"survival_threshold({minimum:g})")


def stop_after(feature_name: str, minimum: float) -> Policy:
    """Verifies drafts up to and including the first whose value is below a minimum: x_i iff f_1..f_{i-1} >= minimum.

    The unsure draft itself is verified, so that a decision reads positions < i only: lossless under every rule, even
    on `logit_q_sampled`. NaN stops.

    Args, Raises: as `threshold`.

    References:
      Zhang et al., Draft & Verify, 2023 (constant threshold); the assistant confidence threshold of Hugging Face
      assisted generation, see `confidence_stop`.
    """
    one_of("feature_name", feature_name, _READABLE)
    minimum = static_float("minimum", minimum, -float("inf"))
    name = f"stop_after({feature_name} < {minimum:g})"

    def slots(state, inputs):
        return _leading(_before(read_input(name, inputs, feature_name) >= minimum), inputs), state

    return by_slots(name, slots, reads=(feature_name,), couples="none", window="strict")


def confidence_stop(confidence: float = 0.4) -> Policy:
    """Hugging Face's assisted generation: stops after a draft with q(x_i) < confidence, and verifies it.

    Args:
      confidence: probability in (0, 1).

    Raises:
      TypeError, ValueError: `confidence` is not a number in (0, 1).
    """
    log_odds = _log_odds("confidence", confidence)
    return stop_after("logit_q_sampled", log_odds)._replace(name=f"confidence_stop(q(x) < {confidence:g})")


def specdec_stop(rejection: float = 0.7) -> Policy:
    """SpecDec++: stops after draft i once the predicted probability of a rejection, 1 - S_i, exceeds a bound.

    The draft at which that happens is kept and verified. Reads survival at positions < i.

    Args:
      rejection: h in (0, 1).

    Raises:
      TypeError, ValueError: not a number in [0, 1].

    References:
      Huang et al., SpecDec++: Boosting Speculative Decoding via Adaptive Candidate Lengths, 2024.
    """
    rejection = static_float("rejection", rejection, 0.0, 1.0)
    return stop_after("survival", 1.0 - rejection)._replace(name=f"specdec_stop(1 - S > {rejection:g})")


def entropy_stop(coefficient: float, maximum: float) -> Policy:
    """Stops before a draft whose entropy bound is too high: verifies x_i iff sqrt(c H_j) <= maximum for all j <= i.

    H is the entropy of the draft law in nats, known before x_i is drawn: lossless under every rule. SVIP (Zhang et
    al., 2024): sqrt(.15 H) > .3 stops. NaN stops.

    Args:
      coefficient: c >= 0.
      maximum: >= 0.

    Raises:
      TypeError, ValueError: not numbers, or negative.
    """
    coefficient = static_float("coefficient", coefficient, 0.0)
    maximum = static_float("maximum", maximum, 0.0)
    name = f"entropy_stop(sqrt({coefficient:g} H) > {maximum:g})"

    def slots(state, inputs):
        entropy = read_input(name, inputs, "entropy")
        return _leading(jnp.sqrt(coefficient * jnp.maximum(entropy, 0.0)) <= maximum, inputs), state

    return by_slots(name, slots, reads=("entropy",), couples="none", window="causal")


def adaedl(gamma: float = 0.2, minimum: float = 0.4) -> Policy:
    """AdaEDL: stops before a draft whose bound on acceptance, 1 - sqrt(gamma H), falls below a minimum.

    Args:
      gamma: >= 0, of the bound.
      minimum: lambda in [0, 1].

    Raises:
      TypeError, ValueError: not numbers, or out of range.

    References:
      Agrawal et al., AdaEDL: Early Draft Stopping for Speculative Decoding via an Entropy-based Lower Bound, 2024.
    """
    minimum = static_float("minimum", minimum, 0.0, 1.0)
    return entropy_stop(gamma, 1.0 - minimum)._replace(name=f"adaedl(1 - sqrt({gamma:g} H) < {minimum:g})")


def draft_and_verify(
    *,
    initial: float = 0.6,
    goal: float = 0.9,
    step: float = 0.01,
    acceptance_decay: float = 0.5,
    threshold_decay: float = 0.9,
    num_requests: int = 1,
) -> Policy:
    """Draft & Verify's adaptive rule: stops after a draft with q(x_i) < gamma, and moves gamma by what was accepted.

    After each round: r = b1 r + (1 - b1) accepted / tested; gamma' = gamma + step if r <= goal, else gamma - step;
    gamma = b2 gamma + (1 - b2) gamma'; r starts at the goal. Past rounds only move gamma, and the unsure draft is
    verified: lossless under every rule.

    Args:
      initial: gamma at the start, in [0, 1]; it stays there.
      goal: share accepted that is aimed at.
      step: of gamma.
      acceptance_decay, threshold_decay: b1 and b2, in [0, 1].
      num_requests: 1 for one threshold of the whole batch (moved by the pooled share), or B for one per request.

    Raises:
      TypeError, ValueError: values out of range; at trace time, a batch of another size.

    References:
      Zhang et al., Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative Decoding, 2023.
    """
    numbers = {"initial": initial, "goal": goal, "step": step}
    numbers |= {"acceptance_decay": acceptance_decay, "threshold_decay": threshold_decay}
    for name, value in numbers.items():
        static_float(name, value, 0.0, 1.0)
    rows = static_int("num_requests", num_requests, 1)
    name = "draft_and_verify"

    def init():
        return AdaptiveThresholdState(jnp.full((rows,), initial, jnp.float32), jnp.full((rows,), goal, jnp.float32))

    def slots(state, inputs):
        accepted, tested = last_verdicts(name, inputs)
        values = read_input(name, inputs, "logit_q_sampled")
        if rows not in (1, len(accepted)):
            raise ValueError(f"num_requests: expected 1 or B={len(accepted)}, got {rows}")
        if rows == 1:
            accepted, tested = jnp.sum(accepted, keepdims=True), jnp.sum(tested, keepdims=True)
        share = accepted.astype(jnp.float32) / jnp.maximum(tested, 1).astype(jnp.float32)
        running = acceptance_decay * state.acceptance + (1 - acceptance_decay) * share
        moved = jnp.clip(state.threshold + jnp.where(running <= goal, step, -step), 0.0, 1.0)
        gamma = threshold_decay * state.threshold + (1 - threshold_decay) * moved
        state = jax.tree.map(
            lambda new, old: jnp.where(tested > 0, new, old), AdaptiveThresholdState(gamma, running), state
        )
        sure = jax.nn.sigmoid(values) >= state.threshold[:, None]
        return _leading(_before(sure), inputs), state

    return by_slots(name, slots, init=init, reads=("logit_q_sampled",), couples="none", window="strict")


def cumulative_confidence(minimum: float) -> Policy:
    """EAGLE-2's score on a chain: verifies x_i iff q_1(x_1) ... q_i(x_i) >= minimum.

    Reads drawn tokens at positions <= i. With drafts chosen greedily (point masses, as EAGLE-2 does) nothing is random
    and every rule is lossless; with sampled drafts the standard rule is not.

    Args:
      minimum: probability in [0, 1].

    Raises:
      TypeError, ValueError: not a number in [0, 1].

    References:
      Li et al., EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees, 2024.
    """
    minimum = static_float("minimum", minimum, 0.0, 1.0)
    name = f"cumulative_confidence(>= {minimum:g})"

    def slots(state, inputs):
        return _leading(drawn_confidence(name, inputs) >= minimum, inputs), state

    return by_slots(name, slots, reads=("logit_q_sampled",), couples="none", window="causal")


def drawn_confidence(policy_name: str, inputs) -> Float[Array, "B K"]:
    """q_1(x_1) ... q_i(x_i), float32 [B, K], from the feature `logit_q_sampled`."""
    return jax.lax.cumprod(jax.nn.sigmoid(read_input(policy_name, inputs, "logit_q_sampled")), axis=1)


def mean_threshold(feature_name: str, minimum: float, *, over: str = "block") -> Policy:
    """A threshold clamped to a mean: verifies x_i iff f_1..f_i >= min(minimum, mean of f), so that something passes.

    The mean reads what it should not. Over the request's own block it looks at later drafts. Over the other requests of
    the batch it looks at drafts that nothing has revealed yet: every request's own law stays what `threshold` makes of
    it, the joint law of the batch is bent. For comparison, and for the deferred rule.

    Args:
      feature_name, minimum: as in `threshold`.
      over: "block", the mean over the request's drafts of this round; "batch", over those of all other requests (0
        where there are none).

    Raises:
      TypeError, ValueError: unknown names, or NaN.
    """
    one_of("feature_name", feature_name, _READABLE)
    one_of("over", over, ("block", "batch"))
    minimum = static_float("minimum", minimum, -float("inf"))
    name = f"mean_threshold({feature_name} >= {minimum:g}, {over})"

    def slots(state, inputs):
        values = read_input(name, inputs, feature_name)
        valid = valid_slots(usable_drafts(inputs), values.shape[1])
        totals = jnp.sum(jnp.where(valid, values, 0), axis=1)
        numbers = jnp.sum(valid, axis=1, dtype=values.dtype)
        if over == "batch":
            others = ~jnp.eye(len(totals), dtype=jnp.bool_)
            totals, numbers = (jnp.sum(jnp.where(others, x[None, :], 0), axis=1) for x in (totals, numbers))
        bound = jnp.minimum(minimum, totals / jnp.maximum(numbers, 1))
        return _leading(values >= bound[:, None], inputs), state

    window, couples = ("block", "none") if over == "block" else ("causal", "live")
    return by_slots(name, slots, reads=(feature_name,), couples=couples, window=window)


def clear_short(policy: Policy, minimum_length: int) -> Policy:
    """Throws short selections away: n if n >= minimum_length, else 0 (llama.cpp's n_min).

    Whether x_1 is verified then depends on drafts up to minimum_length, so only the deferred rule keeps it lossless
    (unless minimum_length is 1).

    Args:
      policy: decides n.
      minimum_length: at least 1.

    Raises:
      TypeError, ValueError: not an int of at least 1.
    """
    minimum_length = static_int("minimum_length", minimum_length, 1)

    def decide(state, inputs):
        number, state = policy.decide(state, inputs)
        return jnp.where(number >= minimum_length, number, 0), state

    window = policy.window if minimum_length == 1 or policy.window == "past" else "block"
    name = f"clear_short({policy.name}, {minimum_length})"
    return policy._replace(decide=decide, name=name, window=window, slots=None, admission=None)


def _leading(passed, inputs):
    """The leading run of passed drafts, bool [B, K]."""
    passed = passed & valid_slots(usable_drafts(inputs), passed.shape[1])
    return jax.lax.cummin(passed.astype(jnp.int32), axis=1) > 0


def _before(passed):
    """Shifts by one: what holds of the draft before, and nothing is asked of the first."""
    first = jnp.ones((passed.shape[0], 1), jnp.bool_)
    return jnp.concatenate([first, passed[:, :-1]], axis=1)


def _log_odds(name, probability):
    probability = static_float(name, probability, 0.0, 1.0)
    with np.errstate(divide="ignore"):
        return float(np.log(probability) - np.log1p(-probability))
