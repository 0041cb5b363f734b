"""Policies: what to verify in each round, and under which rules that leaves the target's law untouched.

A policy decides `num_verified` per request, after the drafts are drawn and before the target sees them. A decision that
looks at the wrong thing bends the output law, so every policy declares what it reads, and `require_lossless` refuses
combinations that are not exact. Whether draft x_i is verified may depend on

* standard rule: x_<i, the draft laws q_1..q_i and past rounds, never on x_i or anything later of its own request;
* coupled rule: x_<=i, q_1..q_{i+1} and past rounds, never on x_{i+1} or anything later of its own request;
* deferred rule: anything.

What others draw never matters for a request's own law; for the joint law of a batch it does, see `Policy.couples`.
"""

from specav.policies.base import Admission, Policy, PolicyInputs, by_admission, by_number, by_slots, from_function
from specav.policies.exactness import (
    COUPLINGS,
    DRAFTERS,
    RULES,
    WINDOWS,
    Verdict,
    declared_dependence,
    lossless_rules,
    require_lossless,
    verdict,
)
from specav.policies.simple import everything, fixed, nothing
from specav.policies.stopping import (
    AdaptiveThresholdState,
    adaedl,
    clear_short,
    confidence_stop,
    cumulative_confidence,
    draft_and_verify,
    entropy_stop,
    mean_threshold,
    specdec_stop,
    stop_after,
    survival_threshold,
    threshold,
)
from specav.policies.trimming import TrimmerState, early_stop, live_argmax, tetris, trimmer

__all__ = [
    "COUPLINGS",
    "DRAFTERS",
    "RULES",
    "WINDOWS",
    "AdaptiveThresholdState",
    "Admission",
    "Policy",
    "PolicyInputs",
    "TrimmerState",
    "Verdict",
    "adaedl",
    "by_admission",
    "by_number",
    "by_slots",
    "clear_short",
    "confidence_stop",
    "cumulative_confidence",
    "declared_dependence",
    "draft_and_verify",
    "early_stop",
    "entropy_stop",
    "everything",
    "fixed",
    "from_function",
    "live_argmax",
    "lossless_rules",
    "mean_threshold",
    "nothing",
    "require_lossless",
    "specdec_stop",
    "stop_after",
    "survival_threshold",
    "tetris",
    "threshold",
    "trimmer",
    "verdict",
]
