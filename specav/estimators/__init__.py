"""Online acceptance estimators: calibrated probabilities that a draft will be accepted, learned while decoding."""

from specav.estimators.base import AcceptanceEstimator, LogisticState, RefitInfo
from specav.estimators.online import OnlineState, online_logistic
from specav.estimators.vllm import vllm_online

__all__ = ["AcceptanceEstimator", "LogisticState", "OnlineState", "RefitInfo", "online_logistic", "vllm_online"]
