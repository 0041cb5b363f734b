"""The catalogue: what published systems decide, draw and test, ready to be judged by the laboratory.

A `Practice` is a policy for given shapes together with the drafts it is used on. Most entries are policies of
`specav.policies`; the last ones are faults of the laws themselves, which no policy can mend. Verdicts are not written
here: `python -m experiments.losslessness` measures them, and the tests keep them.
"""

from collections.abc import Callable
from typing import NamedTuple

import ml_dtypes
import numpy as np

from specav import policies
from specav.costs import CostTable, cost_table
from specav.features import feature_class
from specav.lossless.scheme import Scheme, processed, sampled_with
from specav.policies import Policy
from specav.sampling import SamplingParams


class Practice(NamedTuple):
    """Something that decoders do.

    Attributes:
      name: for tables.
      policy: (num_requests B, num_draft_tokens K) -> Policy; cost tables and capacities scale with the shapes.
      source: paper or system.
      formula: what is verified, in words or symbols.
      features: of the estimator behind acceptance and survival; empty if the policy reads neither.
      scheme: how drafts are drawn and tested.
    """

    name: str
    policy: Callable[[int, int], Policy]
    source: str
    formula: str
    features: tuple[str, ...] = ()
    scheme: Scheme = Scheme()

    @property
    def acceptance_depends_on(self) -> str:
        """Class of the estimator, "prefix" or "draw"."""
        return feature_class(self.features) if self.features else "prefix"


def stair_costs(num_requests: int, num_draft_tokens: int) -> CostTable:
    """Step times with a jump at the first verified draft and little beyond: 1, 2, 2.22 for one request and K = 2.

    It pays to verify much or nothing, which is what makes a live budget look ahead.
    """
    extra = np.arange(num_requests * num_draft_tokens + 1)
    times = np.where(extra > 0, 2.0 + 0.22 * (extra - 1) / num_requests, 1.0)
    return cost_table(num_requests + extra, times)


def rising_costs(num_requests: int, num_draft_tokens: int) -> CostTable:
    """Step times that rise ever faster, on which a local search is not stuck at 0."""
    share = np.arange(num_requests * num_draft_tokens + 1) / num_requests
    return cost_table(num_requests + np.arange(len(share)), 1.0 + 0.25 * share + 0.05 * share**2)


def _draws(name, policy, source, formula, **more):
    return Practice(name, lambda b, k: policy, source, formula, **more)


def _bfloat16(logits):
    return processed(np.asarray(logits).astype(ml_dtypes.bfloat16).astype(np.float64))


def _top_p_first(logits):
    """Top-p .8 of the unscaled law, then temperature .6."""
    with np.errstate(divide="ignore"):
        return processed(np.log(processed(logits, SamplingParams(top_p=0.8))), SamplingParams(temperature=0.6))


_PREFIX, _DRAWN = ("logit_q_max",), ("logit_q_sampled",)
_EAGLE = policies.cumulative_confidence(0.4)
_ALL = policies.everything()

CATALOGUE: tuple[Practice, ...] = (
    Practice("fixed length", lambda b, k: policies.fixed(k - 1), "Leviathan et al. 2023", "n = gamma"),
    _draws(
        "threshold on max q", policies.threshold("logit_q_max", 0.5), "Kangaroo (Liu et al. 2024)", "q_max_1..i >= .62"
    ),
    _draws(
        "threshold on drawn q, discarding",
        policies.threshold("logit_q_sampled", 0.0),
        "p_min on sampled drafts",
        "q_1(x_1) .. q_i(x_i) >= .5",
    ),
    _draws(
        "stop after low drawn q",
        policies.confidence_stop(0.5),
        "Hugging Face assisted generation",
        "q_j(x_j) >= .5 for j < i",
    ),
    Practice(
        "Draft & Verify, adaptive threshold",
        lambda b, k: policies.draft_and_verify(initial=0.5, step=0.1, num_requests=b),
        "Zhang et al. 2023",
        "q_j(x_j) >= gamma_t for j < i, gamma_t from past rounds",
    ),
    _draws("AdaEDL", policies.adaedl(0.2, 0.7), "Agrawal et al. 2024", "1 - sqrt(.2 H_j) >= .7 for j <= i"),
    _draws("SVIP", policies.entropy_stop(0.15, 0.3), "Zhang et al. 2024", "sqrt(.15 H_j) <= .3 for j <= i"),
    _draws(
        "SpecDec++",
        policies.specdec_stop(0.5),
        "Huang et al. 2024",
        "1 - S_j <= .5 for j < i, S of a head that reads x_j",
        features=_DRAWN,
    ),
    _draws(
        "EAGLE-2 score, point-mass drafts",
        _EAGLE,
        "Li et al. 2024",
        "q_1(x_1) ... q_i(x_i) >= .4",
        scheme=Scheme(drafter="point_mass"),
    ),
    _draws("EAGLE-2 score, sampled drafts", _EAGLE, "the same, sampled", "q_1(x_1) ... q_i(x_i) >= .4"),
    Practice(
        "TETRIS",
        lambda b, k: policies.tetris((b * k + 1) // 2),
        "Wu et al. 2025",
        "top half of the batch by q_1(x_1) ... q_i(x_i)",
    ),
    *(
        Practice(f"{name}, {which} q", make, source, formula, features=features)
        for name, make, source, formula in (
            (
                "live argmax",
                lambda b, k: policies.live_argmax(stair_costs(b, k)),
                "TurboSpec (Liu et al. 2024)",
                "top B of S_t, B = argmax of tokens per second at S_t",
            ),
            (
                "early stop",
                lambda b, k: policies.early_stop(rising_costs(b, k)),
                "DSpark, algorithm 1",
                "slots by S_t until the next one does not pay",
            ),
            (
                "lagged budget",
                lambda b, k: policies.trimmer(rising_costs(b, k), initial_budget=(b * k + 1) // 2),
                "vLLM adaptive verification",
                "top B of S_t, B = argmax of tokens per second at S_{t-1}",
            ),
        )
        for which, features in (("max", _PREFIX), ("drawn", _DRAWN))
    ),
    _draws(
        "threshold clamped to the block mean",
        policies.mean_threshold("logit_q_max", 1.0, over="block"),
        "a common safeguard",
        "q_max at least min(.73, mean over the request's block)",
    ),
    _draws(
        "threshold clamped to the batch mean",
        policies.mean_threshold("logit_q_max", 1.0, over="batch"),
        "a common safeguard",
        "q_max at least min(.73, mean over the other requests)",
    ),
    _draws(
        "n_min clearing",
        policies.clear_short(policies.threshold("logit_q_sampled", 0.0), 2),
        "llama.cpp, on sampled drafts",
        "threshold on drawn q, then n < 2 becomes 0",
    ),
    _draws(
        "argmax drafts accepted with p/q",
        _ALL,
        "greedy drafting before a sampling verifier",
        "x = argmax q, accepted with min(1, p/q)",
        scheme=Scheme(drafter="point_mass", tested=processed, name="argmax drafts accepted with p/q"),
    ),
    _draws(
        "top-k on the drafting side only",
        _ALL,
        "q returned before the mask",
        "x ~ top-2 of q, tested with q",
        scheme=Scheme(drawn=sampled_with(SamplingParams(top_k=2)), tested=processed, name="top-k on one side"),
    ),
    _draws(
        "q returned in bfloat16",
        _ALL,
        "logits stored in half precision",
        "x ~ float32 q, tested with the q of rounded logits",
        scheme=Scheme(tested=_bfloat16, name="bfloat16 q"),
    ),
    _draws(
        "top-p before temperature on one side",
        _ALL,
        "two sampling pipelines",
        "x drawn with top-p then temperature, tested with temperature then top-p",
        scheme=Scheme(
            drawn=_top_p_first,
            tested=sampled_with(SamplingParams(temperature=0.6, top_p=0.8)),
            target=sampled_with(SamplingParams(temperature=0.6)),
            name="top-p before temperature on one side",
        ),
    ),
    *(
        _draws(
            f"residual with an epsilon of {epsilon:g}",
            _ALL,
            "guards against an empty residual",
            f"residual proportional to max(p - q, 0) + {epsilon:g}",
            scheme=Scheme(
                residual=lambda p, q, epsilon=epsilon: np.maximum(p - q, 0) + epsilon, name=f"residual + {epsilon:g}"
            ),
        )
        for epsilon in (1e-9, 1e-7)
    ),
)
