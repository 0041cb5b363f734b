"""How drafts are drawn and tested: the part of speculative decoding that a policy takes for granted.

No policy is exact if the verifier believes a wrong draft law. A `Scheme` states both sides as functions of raw logits,
so that such faults (top-k on one side only, argmax drafts tested as if sampled, a residual with an epsilon) can be
given to the same laboratory as policies. The default is speculative sampling as it should be.

Everything here is float64 NumPy, written apart from the JAX code that it judges.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from specav._checks import one_of
from specav.policies import DRAFTERS
from specav.sampling import SamplingParams

Law = Callable[[np.ndarray], np.ndarray]


class Scheme(NamedTuple):
    """Laws of drafting and verification. A `Law` maps raw logits float64 [..., V] to probabilities [..., V].

    Attributes:
      drafter: "autoregressive" (Markov heads included), "parallel" or "point_mass". Point masses are the most likely
        token of the drawn law.
      drawn: law of the drafts.
      tested: law that the verifier takes for q. None: the one that drafts are drawn from (a one-hot row for point
        masses), as it must be.
      target: law of the target's rows as the verifier takes them for p.
      promised: law that the output is held to. None: `target`.
      residual: (p [..., V], q [..., V]) -> weights [..., V] of the token drawn after a rejection. None: max(p - q, 0).
      name: for messages and tables.
    """

    drafter: str = "autoregressive"
    drawn: Law = lambda logits: processed(logits)
    tested: Law | None = None
    target: Law = lambda logits: processed(logits)
    promised: Law | None = None
    residual: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None
    name: str = "speculative sampling"


def as_scheme(drafter: str | Scheme) -> Scheme:
    """A `Scheme` from a kind of drafter, or itself.

    Raises:
      ValueError: an unknown kind.
    """
    if isinstance(drafter, Scheme):
        one_of("drafter.drafter", drafter.drafter, DRAFTERS)
        return drafter
    return Scheme(drafter=one_of("drafter", drafter, DRAFTERS))


def sampled_with(params: SamplingParams) -> Law:
    """The law of logits under temperature, top-k and top-p, in this order (`processed`).

    Args:
      params: scalars.
    """
    return lambda logits: processed(logits, params)


def processed(logits: np.ndarray, params: SamplingParams = SamplingParams()) -> np.ndarray:
    """Probabilities float64 [..., V] of raw logits under temperature, then top-k, then top-p.

    The same definition as `specav.process_logits`, in float64 NumPy: ties with the last token kept are kept, and
    temperature 0 is a point mass on the first maximum.

    Args:
      logits: float [..., V]; -inf excludes a token.
      params: scalars.
    """
    z = np.asarray(logits, np.float64)
    if float(params.temperature) <= 0:
        return np.eye(z.shape[-1])[np.argmax(z, axis=-1)]
    probs = _softmax(z / float(params.temperature))
    if params.top_k is not None and int(params.top_k) >= 1:
        ordered = -np.sort(-probs, axis=-1)
        probs = _keep(probs, ordered[..., min(int(params.top_k), z.shape[-1]) - 1])
    if params.top_p is not None and float(params.top_p) < 1:
        ordered = -np.sort(-probs, axis=-1)
        kept = np.sum(np.cumsum(ordered, axis=-1)[..., :-1] < float(params.top_p), axis=-1)  # beside the first
        probs = _keep(probs, np.take_along_axis(ordered, kept[..., None], axis=-1)[..., 0])
    return probs


def residual_weights(scheme: Scheme, p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Normalised residual law float64 [..., V] after a rejection; p itself where max(p - q, 0) vanishes."""
    weights = np.maximum(p - q, 0.0) if scheme.residual is None else scheme.residual(p, q)
    total = weights.sum(axis=-1, keepdims=True)
    return np.where(total > 0, weights / np.where(total > 0, total, 1.0), p)


def scheme_fault(scheme: Scheme, *, vocabulary: int = 8, trials: int = 64, seed: int = 0) -> str | None:
    """Looks for logits on which the verifier's idea of the laws is wrong, whatever the policy.

    With K = 1 and everything verified, one round must emit the promised law: q a + (1 - sum q a) residual.

    Args:
      scheme: how drafts are drawn and tested.
      vocabulary: V of the logits tried.
      trials: pairs of draft and target logits; half of them are similar.
      seed: of the logits.

    Returns:
      None, or what is wrong in words with the largest total variation found.
    """
    rng = np.random.default_rng(seed)
    shape = (trials, vocabulary)
    z, y = (
        rng.normal(size=shape) * rng.uniform(0.3, 3, (trials, 1)),
        rng.normal(size=shape) * rng.uniform(0.3, 3, (trials, 1)),
    )
    z[::2] = y[::2] + 0.5 * z[::2]
    promised = (scheme.promised or scheme.target)(y)
    distance = 0.5 * np.abs(one_token_law(scheme, z, y) - promised).sum(axis=-1).max()
    if distance < 1e-12:
        return None
    return f"{scheme.name}: the verifier's laws are not those of the drafts (total variation {distance:.2g} per token)"


def one_token_law(scheme: Scheme, draft_logits: np.ndarray, target_logits: np.ndarray) -> np.ndarray:
    """The exact law of the token at the first position when its draft is verified, float64 [..., V].

    Args:
      scheme: how it is drawn and tested.
      draft_logits, target_logits: raw, float [..., V]; V may be large (nothing of size V^2 is made).
    """
    drawn, q, p = drawn_law(scheme, draft_logits), tested_law(scheme, draft_logits), scheme.target(target_logits)
    accepted = drawn * acceptance(p, q)
    return accepted + (1 - accepted.sum(axis=-1, keepdims=True)) * residual_weights(scheme, p, q)


def drawn_law(scheme: Scheme, logits: np.ndarray) -> np.ndarray:
    """The law that drafts are drawn from, a one-hot row for point masses."""
    drawn = scheme.drawn(np.asarray(logits, np.float64))
    if scheme.drafter == "point_mass":
        return np.eye(drawn.shape[-1])[np.argmax(drawn, axis=-1)]
    return drawn


def tested_law(scheme: Scheme, logits: np.ndarray) -> np.ndarray:
    """The law that the verifier takes for q."""
    return drawn_law(scheme, logits) if scheme.tested is None else scheme.tested(np.asarray(logits, np.float64))


def acceptance(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """min(1, p / q) per token, 0 where q = 0."""
    return np.where(q > 0, np.minimum(p / np.where(q > 0, q, 1.0), 1.0), 0.0)


def _softmax(z):
    weights = np.exp(z - z.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def _keep(probs, least):
    kept = np.where(probs >= least[..., None], probs, 0.0)
    return kept / kept.sum(axis=-1, keepdims=True)
