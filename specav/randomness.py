"""Noise that belongs to a token, not to a round: keys by (request, absolute position, purpose), and exact draws.

Losslessness needs each verdict's noise to be independent of everything a policy has seen. Draft noise is keyed by
(request, absolute position, number of tokens committed when it was drawn); accept, residual and bonus noise by
(request, absolute position, purpose). Nothing depends on the row in the batch, on batch-mates or on the round, so
that a request's tokens do not change with its company. (Draft noise keyed by position alone is a trap: after a
rejection the redraft would reuse noise that past rounds, hence the policy, have already seen.)

The two draws are exact for the float32 weights given: no epsilon, no resolution limit at 2^-23. The usual float32
Gumbel trick has one: its uniforms are multiples of 2^-23, and tokens rarer than about 1e-6 get the wrong mass.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

# What a draw is for. The numbers are part of the random stream: never change them.
DRAFT, ACCEPT, RESIDUAL, BONUS = 0, 1, 2, 3


def request_keys(key: Key[Array, "..."] | UInt32[Array, "..."], num_requests: int) -> Key[Array, " B"]:
    """Returns one key per request.

    Args:
      key: keys [B], one per request, which must be distinct; or one key, folded with the row index. Only the first
        form makes a request's tokens independent of its place in the batch. New-style typed keys
        (`jax.random.key`) or raw uint32 keys (`jax.random.PRNGKey`).
      num_requests: B.

    Returns:
      Typed keys [B].

    Raises:
      TypeError: `key` is not a PRNG key.
      ValueError: there are keys for another number of requests.
    """
    if not isinstance(key, jax.Array):
        raise TypeError(f"key: expected a JAX PRNG key or keys [B={num_requests}], got {type(key).__name__}")
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        if key.dtype != jnp.uint32 or key.ndim == 0:
            raise TypeError(f"key: expected a JAX PRNG key or keys [B={num_requests}], got {key.dtype} {key.shape}")
        key = jax.random.wrap_key_data(key)
    if key.ndim == 0:
        return jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(num_requests))
    if key.shape != (num_requests,):
        raise ValueError(f"key: expected one key or keys [B={num_requests}], got keys {list(key.shape)}")
    return key


def draft_keys(
    keys: Key[Array, " *b"], positions: Int[Array, " *b"], num_committed: Int[Array, " *b"]
) -> Key[Array, " *b"]:
    """Keys of draft tokens: by request, absolute position and tokens committed when the draft is drawn.

    Args:
      keys: typed keys [...] of the requests.
      positions: int [...], absolute positions of the drafts.
      num_committed: int [...], tokens committed at that time.

    Returns:
      Typed keys [...].
    """
    return _fold(_fold(_fold(keys, jnp.full_like(positions, DRAFT)), positions), num_committed)


def verdict_keys(
    keys: Key[Array, " *b"], positions: Int[Array, " *b"], purpose: int | Int[Array, " *b"]
) -> Key[Array, " *b"]:
    """Keys of accept, residual and bonus noise: by request, purpose and absolute position.

    Args:
      keys: typed keys [...] of the requests.
      positions: int [...], absolute positions.
      purpose: ACCEPT, RESIDUAL or BONUS; an int or int [...].

    Returns:
      Typed keys [...].
    """
    return _fold(_fold(keys, jnp.broadcast_to(jnp.asarray(purpose, positions.dtype), positions.shape)), positions)


def bernoulli(key: Key[Array, ""], probability: Float[Array, ""]) -> Bool[Array, ""]:
    """True with exactly the given float32 probability (to 2^-64): u < p for a 64-bit uniform u in [0, 1).

    Probabilities of at least 1 always pass; 0, negative ones and NaN never do.

    Args:
      key: one typed key.
      probability: float32 [].

    Returns:
      bool [].
    """
    return _below(jax.random.bits(key, (2,), jnp.uint32), probability)


def categorical(key: Key[Array, ""], weights: Float[Array, " V"]) -> Int[Array, ""]:
    """Draws an index with probability proportional to `weights`, each to a relative error of about 1e-6.

    Descends a binary tree of partial sums; at every node the smaller half is entered with its own exact share. An
    index of weight zero is never drawn. Rare indices keep their mass: errors are relative to each weight, not to
    the total. Costs one pass over the weights and 2 log2(V) random words, where a Gumbel draw needs V.

    Args:
      key: one typed key.
      weights: float32 [V], finite and non-negative, of any positive sum.

    Returns:
      int32 []; index 0 if every weight is zero.
    """
    # Padded once, to a power of two: padding odd levels one by one makes XLA (jax 0.12, CPU) compile for minutes.
    size = weights.shape[0]
    levels = [jnp.pad(weights.astype(jnp.float32), (0, (1 << max(size - 1, 0).bit_length()) - size))]
    while levels[-1].shape[0] > 1:
        levels.append(levels[-1][0::2] + levels[-1][1::2])
    bits = jax.random.bits(key, (max(len(levels) - 1, 1), 2), jnp.uint32)
    index = jnp.zeros((), jnp.int32)
    for depth, level in enumerate(reversed(levels[:-1])):
        left, right = level[2 * index], level[2 * index + 1]
        right_is_less = right < left
        less = jnp.where(right_is_less, right, left)
        total = left + right
        # The share of the smaller half is accurate to the last bit, however small; its complement need not be.
        share = jnp.where(total > 0, less / jnp.where(total > 0, total, 1.0), 0.0)
        enter_less = _below(bits[depth], share)
        index = 2 * index + (enter_less == right_is_less).astype(jnp.int32)
        # Both halves zero: stay left, so that an all-zero row gives index 0.
        index = jnp.where(total > 0, index, index - index % 2)
    return index


def _fold(keys, numbers):
    """`fold_in` over arrays of keys and numbers of one shape."""
    flat = jax.vmap(jax.random.fold_in)(keys.reshape(-1), numbers.reshape(-1).astype(jnp.uint32))
    return flat.reshape(keys.shape)


def _below(bits, probability):
    """Whether the 64-bit number (bits[0], bits[1]) is below probability * 2^64, in exact arithmetic."""
    scaled = probability.astype(jnp.float32) * jnp.float32(2.0**32)
    whole = jnp.floor(scaled)
    # Exact: a float32 has 24 significant bits, so the fraction and its scaling by a power of two lose nothing.
    rest = jnp.floor((scaled - whole) * jnp.float32(2.0**32))
    inside = (probability > 0) & (probability < 1)
    high = jnp.where(inside, whole, 0).astype(jnp.uint32)
    low = jnp.where(inside, rest, 0).astype(jnp.uint32)
    return (probability >= 1) | (bits[0] < high) | ((bits[0] == high) & (bits[1] < low))
