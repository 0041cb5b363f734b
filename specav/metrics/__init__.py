"""How good predicted acceptance probabilities are: AUC, log-loss, Brier score, calibration; weighted, in JAX.

Whole arrays: `auc`, `log_loss`, `brier`, `expected_calibration_error`, `reliability_curve`. Streams: `streaming_auc`
and its siblings, each a `StreamingMetric` of pure functions over a small state that can be merged across shards.

Everywhere the same: predictions, labels and weights have one shape [...], labels are bool or numbers in [0, 1] (a soft
label y counts as y of an accepted row and 1 - y of a rejected one), and rows of weight 0 do not matter, NaN or not.
"""

from specav.metrics.arrays import (
    ReliabilityCurve,
    auc,
    brier,
    expected_calibration_error,
    log_loss,
    reliability_curve,
)
from specav.metrics.rows import PROBABILITY_CLIP
from specav.metrics.streaming import (
    AUCBounds,
    StreamingMetric,
    streaming_auc,
    streaming_brier,
    streaming_expected_calibration_error,
    streaming_log_loss,
    streaming_reliability_curve,
)

__all__ = [
    "PROBABILITY_CLIP",
    "AUCBounds",
    "ReliabilityCurve",
    "StreamingMetric",
    "auc",
    "brier",
    "expected_calibration_error",
    "log_loss",
    "reliability_curve",
    "streaming_auc",
    "streaming_brier",
    "streaming_expected_calibration_error",
    "streaming_log_loss",
    "streaming_reliability_curve",
]
