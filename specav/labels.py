"""Which drafts were accepted, and which of them tell us anything: labels with censoring.

A draft is *observed* if it was tested and every earlier draft of its request was accepted. The first rejection is
observed, everything behind it is not: those verdicts were never given, and counting them as rejections would bias
every estimate.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from specav._checks import one_of, shaped, static_int

RULES = ("standard", "coupled", "deferred")


class Labels(NamedTuple):
    """What one round of verification teaches.

    Attributes:
      accepted: bool [B, K], the verdicts; or float [B, K] in [0, 1], soft labels such as the exact acceptance
        probability. Only meaningful where `observed`.
      observed: bool [B, K], slots with a verdict.
    """

    accepted: Shaped[Array, "B K"]
    observed: Bool[Array, "B K"]


def verification_labels(
    num_accepted: Int[Array, " B"],
    num_tested: Int[Array, " B"],
    num_positions: int,
    *,
    num_labelled: Int[Array, " B"] | None = None,
) -> Labels:
    """Labels of a round, the same for all three verification rules: only `num_tested` differs between them.

    With 0-based columns i: accepted[i] = i < num_accepted, observed[i] = i < min(num_accepted + 1, num_tested).
    A request without drafts, or an empty slot of the batch, has num_tested = 0 and observes nothing.

    Args:
      num_accepted: int [B], drafts accepted, clamped to [0, num_tested].
      num_tested: int [B], drafts put to the test (`num_tested_drafts`), clamped to [0, K].
      num_positions: K.
      num_labelled: int [B], columns that may count as observed: labels beyond an end-of-sequence token or a token
        limit are ignored. Clamped to [0, K]; None: all.

    Returns:
      `Labels`, bool [B, K].

    Raises:
      TypeError, ValueError: wrong shapes or dtypes, or num_positions below 1.
    """
    width = static_int("num_positions", num_positions, 1)
    dims: dict = {}
    num_accepted = shaped(dims, "num_accepted", num_accepted, "B", "int").astype(jnp.int32)
    num_tested = jnp.clip(shaped(dims, "num_tested", num_tested, "B", "int").astype(jnp.int32), 0, width)
    num_accepted = jnp.clip(num_accepted, 0, num_tested)
    num_observed = jnp.minimum(num_accepted + 1, num_tested)
    if num_labelled is not None:
        limit = shaped(dims, "num_labelled", num_labelled, "B", "int").astype(jnp.int32)
        num_observed = jnp.minimum(num_observed, jnp.maximum(limit, 0))
    columns = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (num_tested.shape[0], width))
    return Labels(accepted=columns < num_accepted[:, None], observed=columns < num_observed[:, None])


def num_tested_drafts(
    num_verified: Int[Array, " B"],
    num_drafts: Int[Array, " B"],
    rule: str,
) -> Int[Array, " B"]:
    """Number of drafts that a verification rule puts to the test.

    Feeding n drafts yields n + 1 target rows. The standard rule tests n drafts and keeps the last row for a bonus
    token; the coupled and the deferred rule test draft n + 1 on it, if there is one.

    Args:
      num_verified: int [B], n, clamped to [0, num_drafts].
      num_drafts: int [B], drafts that each request really has; negative counts as 0.
      rule: "standard", "coupled" or "deferred".

    Returns:
      int32 [B]: n under the standard rule, min(n + 1, num_drafts) under the others.

    Raises:
      TypeError, ValueError: wrong shapes or dtypes, or an unknown rule.
    """
    one_of("rule", rule, RULES)
    dims: dict = {}
    num_verified = shaped(dims, "num_verified", num_verified, "B", "int").astype(jnp.int32)
    num_drafts = jnp.maximum(shaped(dims, "num_drafts", num_drafts, "B", "int").astype(jnp.int32), 0)
    num_verified = jnp.clip(num_verified, 0, num_drafts)
    return num_verified if rule == "standard" else jnp.minimum(num_verified + 1, num_drafts)
