"""specav: calibrated acceptance estimators and lossless adaptive verification for speculative decoding.

A cheap draft model proposes K tokens, the target verifies them. The library predicts, for every draft token, the
probability that it will be accepted, verifies the drafts worth their cost, and leaves the target's output law as it is.
"""

from specav import (
    costs,
    decode,
    drafting,
    estimators,
    features,
    labels,
    layout,
    lossless,
    metrics,
    persistence,
    policies,
    randomness,
    sampling,
    statistics,
    survival,
    traces,
    trimmer,
    verification,
)
from specav._version import __version__
from specav.costs import CostTable, cost_table
from specav.features import FEATURES, DraftFeatures, FeatureSpec, draft_features, feature_class, stack_features
from specav.labels import Labels, verification_labels
from specav.sampling import SamplingParams, process_logits
from specav.survival import survival_probabilities
from specav.trimmer import allocate_budget, choose_budget
from specav.verification import (
    Acceptance,
    DraftBlock,
    VerifyResult,
    acceptance_probabilities,
    carry_over,
    speculative_verify,
)

__all__ = [
    "FEATURES",
    "Acceptance",
    "CostTable",
    "DraftBlock",
    "DraftFeatures",
    "FeatureSpec",
    "Labels",
    "SamplingParams",
    "VerifyResult",
    "__version__",
    "acceptance_probabilities",
    "allocate_budget",
    "carry_over",
    "choose_budget",
    "cost_table",
    "costs",
    "decode",
    "draft_features",
    "drafting",
    "estimators",
    "feature_class",
    "features",
    "labels",
    "layout",
    "lossless",
    "metrics",
    "persistence",
    "policies",
    "process_logits",
    "randomness",
    "sampling",
    "speculative_verify",
    "stack_features",
    "statistics",
    "survival",
    "survival_probabilities",
    "traces",
    "trimmer",
    "verification",
    "verification_labels",
]
