"""Survival: the probability that a draft and all drafts before it are accepted.

A draft is worth its verification only if every earlier draft of its request passes too. Survival is what budgets add
up and what allocations rank, so its order must be exact: it never increases along a request, in floats too.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specav._checks import shaped, static_int


def survival_probabilities(acceptance: Float[Array, "B K"], num_drafts: Int[Array, " B"]) -> Float[Array, "B K"]:
    """S_i, the probability that x_1..x_i are all accepted, from conditional acceptance probabilities.

    S_i = min over j <= i of a_1 * ... * a_j. The product alone is not monotone if rounding or the summation order says
    so, nor if a_i is a prediction that reads earlier drawn tokens; the running minimum makes it so. S_i reads
    a_1..a_i only, bit for bit.

    Args:
      acceptance: float [B, K], predicted P(x_i accepted | x_<i accepted); clipped to [0, 1], NaN counts as 0.
      num_drafts: int [B], drafts that each request really has; clamped to [0, K].

    Returns:
      float32 [B, K] in [0, 1], non-increasing along K, 0 beyond num_drafts.

    Raises:
      TypeError, ValueError: wrong dtypes or shapes.

    References:
      Leviathan et al., Fast Inference from Transformers via Speculative Decoding, ICML 2023 (the product of
      conditional acceptance probabilities).
    """
    dims: dict[str, Any] = {}
    acceptance = shaped(dims, "acceptance", acceptance, "B K", "float").astype(jnp.float32)
    num_drafts = shaped(dims, "num_drafts", num_drafts, "B", "int")
    # `> 0` is false for NaN, and turns -0 into 0.
    acceptance = jnp.where(acceptance > 0, jnp.minimum(acceptance, 1.0), 0.0)
    product = jax.lax.cumprod(acceptance, axis=1)
    return jnp.where(valid_slots(num_drafts, dims["K"]), jax.lax.cummin(product, axis=1), 0.0)


def valid_slots(num_drafts: Int[Array, "*b"], num_positions: int) -> Bool[Array, "*b K"]:
    """Which slots hold a draft: position < num_drafts.

    Args:
      num_drafts: int [...].
      num_positions: K.

    Returns:
      bool [..., K].

    Raises:
      TypeError, ValueError: wrong dtype, or K < 0.
    """
    num_drafts = shaped({}, "num_drafts", num_drafts, "...", "int")
    width = static_int("num_positions", num_positions, 0)
    positions = jnp.arange(width, dtype=num_drafts.dtype).reshape((1,) * num_drafts.ndim + (width,))
    return jnp.broadcast_to(positions, (*num_drafts.shape, width)) < num_drafts[..., None]
