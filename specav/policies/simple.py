"""Policies that look at one request at a time: constant lengths and thresholds."""

import jax
import jax.numpy as jnp

from specav._checks import one_of, static_float, static_int
from specav.features import FEATURES
from specav.policies.base import Policy, by_number, by_slots, read_input, usable_drafts
from specav.survival import valid_slots

_EVERYTHING = 2**31 - 1


def everything() -> Policy:
    """Verifies all drafts: n = K_r, plain speculative decoding (Leviathan et al., 2023). Reads nothing."""
    return by_number("everything", _EVERYTHING)


def nothing() -> Policy:
    """Verifies no draft: n = 0. The coupled and deferred rules still test one draft, on the free row. Reads nothing."""
    return by_number("nothing", 0)


def fixed(num_verified: int) -> Policy:
    """Verifies a constant number: n = min(num_verified, K_r), the gamma of Leviathan et al. (2023). Reads nothing.

    Raises:
      TypeError, ValueError: `num_verified` is not an int >= 0.
    """
    num_verified = static_int("num_verified", num_verified, 0)
    return by_number(f"fixed({num_verified})", num_verified)


def threshold(feature_name: str, minimum: float) -> Policy:
    """Verifies the longest prefix of drafts whose values are all at least a minimum: n = max{i: f_1..f_i >= minimum}.

    Depends on the class of the feature at positions <= i. On `logit_q_max` it is Kangaroo's confidence rule (Liu et
    al., 2024), on `logit_q_sampled` the discarding form of Hugging Face's assisted-generation threshold, which the
    standard rule does not allow. NaN fails.

    Args:
      feature_name: a name of `FEATURES`, "acceptance" or "survival".
      minimum: in the feature's units.

    Raises:
      TypeError, ValueError: unknown name, or NaN.
    """
    one_of("feature_name", feature_name, (*FEATURES, "acceptance", "survival"))
    minimum = static_float("minimum", minimum, -float("inf"))
    name = f"threshold({feature_name} >= {minimum:g})"

    def slots(state, inputs):
        num_drafts = usable_drafts(inputs)
        values = read_input(name, inputs, feature_name)
        mask = (values >= minimum) & valid_slots(num_drafts, values.shape[1])
        return jax.lax.cummin(mask.astype(jnp.int32), axis=1) > 0, state

    return by_slots(name, slots, reads=(feature_name,), couples="none", window="causal")


def survival_threshold(minimum: float) -> Policy:
    """Verifies drafts while S_i >= minimum. Depends on the estimator's class at positions <= i.

    SpecDec++ (Huang et al., 2024) stops when 1 - prod of acceptance exceeds h: minimum = 1 - h.

    Raises:
      TypeError, ValueError: `minimum` is not a number in [0, 1].
    """
    policy = threshold("survival", static_float("minimum", minimum, 0.0, 1.0))
    return policy._replace(name=f"survival_threshold({minimum:g})")
