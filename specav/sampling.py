"""From raw logits to the law that is sampled: temperature, then top-k, then top-p, in this one order.

Draft and target must go through the same processing *functions* (their parameters may differ: any draft law is
lossless). The order matters: top-p taken before the temperature on one side only is another law.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specav._checks import shaped
from specav.randomness import categorical


class SamplingParams(NamedTuple):
    """How logits become a law. Scalars, or one value per request [B].

    Attributes:
      temperature: float, >= 0; 0 is greedy (a point mass on the first maximum).
      top_k: int, keep the k most likely tokens; None or any value < 1 keeps all.
      top_p: float, keep the smallest set of most likely tokens whose mass reaches p; None or >= 1 keeps all.
    """

    temperature: float | Float[Array, "*b"] = 1.0
    top_k: int | Int[Array, "*b"] | None = None
    top_p: float | Float[Array, "*b"] | None = None


def process_logits(logits: Float[Array, "*b V"], params: SamplingParams) -> Float[Array, "*b V"]:
    """Applies temperature, top-k and top-p, in this order; excluded tokens become -inf.

    Tokens tied with the last one kept are kept too, so the result does not depend on the order of the vocabulary.
    The most likely token is always kept. NaN logits count as -inf.

    Args:
      logits: float [..., V], raw (penalties and token masks already applied, as -inf).
      params: scalars, or arrays whose shape is a prefix of the logits' leading axes (one value per request).

    Returns:
      float32 [..., V], unnormalised. Temperature 0 gives 0 at the first maximum and -inf elsewhere.

    Raises:
      TypeError, ValueError: wrong dtypes, or parameters whose shape is no prefix of the leading axes.
    """
    logits = shaped({}, "logits", logits, "... V", "float")
    z = jnp.where(jnp.isnan(logits), -jnp.inf, logits.astype(jnp.float32))
    temperature = _per_row("temperature", params.temperature, logits, "real").astype(jnp.float32)
    greedy = temperature <= 0
    one_hot = jnp.where(jax.nn.one_hot(jnp.argmax(z, axis=-1), z.shape[-1], dtype=jnp.bool_), 0.0, -jnp.inf)
    z = jnp.where(greedy, one_hot, z / jnp.where(greedy, 1.0, temperature))
    if params.top_k is None and params.top_p is None:
        return z
    ordered = jnp.flip(jnp.sort(z, axis=-1), axis=-1)
    least = jnp.full(z.shape[:-1] + (1,), -jnp.inf)
    if params.top_k is not None:
        k = _per_row("top_k", params.top_k, logits, "int")
        last = jnp.take_along_axis(ordered, jnp.clip(k - 1, 0, z.shape[-1] - 1), axis=-1)
        least = jnp.where(k >= 1, last, least)
        ordered = jnp.where(ordered >= least, ordered, -jnp.inf)
    if params.top_p is not None:
        p = _per_row("top_p", params.top_p, logits, "real").astype(jnp.float32)
        mass = jnp.cumsum(jax.nn.softmax(ordered, axis=-1), axis=-1)
        # A token stays while the mass before it is below p; so the first always stays.
        num_kept = 1 + jnp.sum(mass[..., :-1] < p, axis=-1, keepdims=True, dtype=jnp.int32)
        last = jnp.take_along_axis(ordered, num_kept - 1, axis=-1)
        least = jnp.where(p < 1, jnp.maximum(least, last), least)
    return jnp.where(z >= least, z, -jnp.inf)


def law(logits: Float[Array, "*b V"]) -> Float[Array, "*b V"]:
    """Probabilities in float32 of logits with any masking; the one softmax of the verifier.

    -inf and NaN logits get probability 0, +inf logits share a point mass. A row without a logit above -inf names no
    law: all its probabilities are 0.
    """
    z, maximum, total = _shifted(logits)
    return jnp.exp(z - maximum) / jnp.where(total > 0, total, 1.0)


def token_probability(logits: Float[Array, "*b V"], tokens: Int[Array, "*b"]) -> Float[Array, "*b"]:
    """`law(logits)` at one token per row, without materialising it; 0 for tokens outside 0..V-1."""
    z, maximum, total = _shifted(logits)
    inside = (tokens >= 0) & (tokens < logits.shape[-1])
    chosen = jnp.take_along_axis(z, jnp.where(inside, tokens, 0)[..., None], axis=-1)
    probability = jnp.exp(chosen - maximum) / jnp.where(total > 0, total, 1.0)
    return jnp.where(inside, probability[..., 0], 0.0)


def sample(keys: Array, logits: Float[Array, "B V"]) -> Int[Array, " B"]:
    """Draws one token per row from `law(logits)`; token 0 where a row names no law.

    Args:
      keys: typed keys [B].
      logits: float [B, V], processed.

    Returns:
      int32 [B].
    """
    return jax.vmap(categorical)(keys, law(logits)).astype(jnp.int32)


def _shifted(logits):
    """float32 logits without NaN and +inf, their maximum and sum of exp(z - maximum), axes kept."""
    z = logits.astype(jnp.float32)
    z = jnp.minimum(jnp.where(jnp.isnan(z), -jnp.inf, z), jnp.finfo(jnp.float32).max)
    maximum = jnp.max(z, axis=-1, keepdims=True)
    maximum = jnp.where(maximum == -jnp.inf, 0.0, maximum)
    return z, maximum, jnp.sum(jnp.exp(z - maximum), axis=-1, keepdims=True)


def _per_row(name, value, logits, kind):
    """A parameter as an array that broadcasts against `logits`: its axes are the leading ones."""
    value = shaped({}, name, value, "...", kind)
    leading = logits.shape[:-1]
    if value.shape != leading[: value.ndim]:
        raise ValueError(f"{name}: expected a scalar or a shape that begins {list(leading)}, got {list(value.shape)}")
    return value.reshape(value.shape + (1,) * (logits.ndim - value.ndim))
