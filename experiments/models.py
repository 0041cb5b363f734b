"""The target and the draft model of the experiments: small decoder-only transformers (flax) with a KV cache.

What a decoding loop needs from a model is one pure function and a state made by `init_cache`:

    logits, state = apply(state, tokens, positions, num_tokens)

`tokens[b, t]` stands at absolute position `positions[b] + t`; the first `num_tokens[b]` of each row are real. Prefill
and decoding are the same call. A token is written into the cache at its own position before it attends, and it attends
to positions up to its own alone: whatever lies beyond is stale and never read, so rolling back costs nothing and
feeding a token twice changes nothing. Every leaf of the state has the batch as its first axis.

Architecture: pre-normalisation (RMSNorm), rotary positions, grouped key-value heads, gated MLP, tied embeddings, and
attention over the last `window` positions, fewer than a training sequence has, so that long texts show the model only
relative distances that it was trained on.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from experiments.storage import load_tree
from experiments.tokenizer import SHIPPED as SHIPPED_TOKENIZER
from experiments.tokenizer import Tokenizer, load_tokenizer

CHECKPOINTS = Path(__file__).parent / "checkpoints"


class Config(NamedTuple):
    """Sizes of one model; `width` is num_heads * head_size."""

    vocab_size: int = 2048
    num_layers: int = 4
    num_heads: int = 6
    num_kv_heads: int = 2
    head_size: int = 32
    mlp_size: int = 512
    window: int = 128

    @property
    def width(self) -> int:
        """Size of the residual stream."""
        return self.num_heads * self.head_size


TARGET = Config()
DRAFT = Config(num_layers=2, num_heads=2, num_kv_heads=1, mlp_size=256)

KVCache = tuple[tuple[Float[Array, "B H L D"], Float[Array, "B H L D"]], ...]
Apply = Callable[
    [KVCache, Int32[Array, "B T"], Int32[Array, " B"], Int32[Array, " B"]],
    tuple[Float[Array, "B T V"], KVCache],
]


class Model(NamedTuple):
    """A model as a decoding loop sees it: pure functions over a state, parameters closed over.

    Attributes:
      config: sizes.
      params: the parameters, float32.
      init_cache: `init_cache(batch, length)` gives the state for `batch` rows and positions 0..length-1.
      apply: `(state, tokens int32 [B, T], positions int32 [B], num_tokens int32 [B]) -> (logits float32 [B, T, V],
        state)`. Logits of padded tokens (t >= num_tokens[b]) are finite and meaningless. Tokens outside the
        vocabulary count as the nearest id in it. Positions at or beyond the cache's length are not stored.
    """

    config: Config
    params: Any
    init_cache: Callable[[int, int], KVCache]
    apply: Apply


class Transformer(nn.Module):
    """The network. With `cache` it writes and reads the cache, without it the sequence attends to itself."""

    config: Config

    @nn.compact
    def __call__(self, tokens, positions, valid=None, cache: KVCache | None = None):
        """Logits [B, T, V] of tokens [B, T] at positions [B, T], and the cache; `valid` [B, T] tells what to store."""
        c = self.config
        embedding = self.param("embedding", nn.initializers.normal(0.02), (c.vocab_size, c.width))
        x = jnp.take(embedding, tokens, axis=0, mode="clip")
        angles = _rotary(positions, c.head_size)
        new_cache = []
        for layer in range(c.num_layers):
            block = Block(c, name=f"block_{layer}")
            x, layer_cache = block(x, positions, angles, valid, cache[layer] if cache is not None else None)
            new_cache.append(layer_cache)
        x = RMSNorm(name="norm")(x)
        logits = jnp.einsum("btd,vd->btv", x, embedding)
        return logits, tuple(new_cache)


class Block(nn.Module):
    """Attention, then the MLP, each on a normalised copy of the residual stream."""

    config: Config

    @nn.compact
    def __call__(self, x, positions, angles, valid, cache):
        """One layer: x [B, T, width] to the same, and the layer's cache."""
        c = self.config
        # The residual branches start small, the deeper the smaller.
        narrow = nn.initializers.normal(0.02 / (2 * c.num_layers) ** 0.5)
        dense = lambda size, name, init: nn.Dense(size, use_bias=False, kernel_init=init, name=name)  # noqa: E731
        wide = nn.initializers.variance_scaling(1.0, "fan_in", "normal")
        batch, length, _ = x.shape

        y = RMSNorm(name="attention_norm")(x)
        heads = c.num_heads + 2 * c.num_kv_heads
        qkv = dense(heads * c.head_size, "qkv", wide)(y).reshape(batch, length, heads, c.head_size)
        qk = _rotate(qkv[:, :, : c.num_heads + c.num_kv_heads], angles)
        q = qk[:, :, : c.num_heads]
        k = qk[:, :, c.num_heads :].swapaxes(1, 2)
        v = qkv[:, :, c.num_heads + c.num_kv_heads :].swapaxes(1, 2)
        if cache is None:
            key_positions = positions
        else:
            k, v = cache = _write(cache, k, v, positions, valid)
            key_positions = jnp.broadcast_to(jnp.arange(k.shape[2])[None], (batch, k.shape[2]))
        distance = positions[:, :, None] - key_positions[:, None, :]
        visible = (distance >= 0) & (distance < c.window)
        y = _attend(q, k, v, visible)
        x = x + dense(c.width, "out", narrow)(y.reshape(batch, length, c.width))

        y = RMSNorm(name="mlp_norm")(x)
        gate, up = jnp.split(dense(2 * c.mlp_size, "gate_up", wide)(y), 2, axis=-1)
        x = x + dense(c.width, "down", narrow)(nn.silu(gate) * up)
        return x, cache


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + 1e-6), times a learned scale."""

    @nn.compact
    def __call__(self, x):
        """Normalises the last axis."""
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        inverse = jax.lax.rsqrt(_sum_last(x * x) / x.shape[-1] + 1e-6)
        return x * inverse * jnp.broadcast_to(scale, x.shape)


def make_model(config: Config, params: Any) -> Model:
    """Closes the network over its parameters."""
    network = Transformer(config)

    def apply(state, tokens, positions, num_tokens):
        steps = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        absolute = positions[:, None] + steps
        valid = steps < num_tokens[:, None]
        return network.apply({"params": params}, tokens, absolute, valid, state)

    return Model(config, params, lambda batch, length: init_cache(config, batch, length), apply)  # pyright: ignore


def init_params(config: Config, seed: int) -> Any:
    """Fresh parameters, float32."""
    tokens = jnp.zeros((1, 2), jnp.int32)
    return Transformer(config).init(jax.random.key(seed), tokens, tokens)["params"]


def init_cache(config: Config, batch: int, length: int) -> KVCache:
    """An empty cache for positions 0..length-1; every leaf is float32 [batch, num_kv_heads, length, head_size]."""
    shape = (batch, config.num_kv_heads, length, config.head_size)
    return tuple((jnp.zeros(shape), jnp.zeros(shape)) for _ in range(config.num_layers))


def forward(config: Config, params: Any, tokens: Int32[Array, "B T"]) -> Float[Array, "B T V"]:
    """Logits of whole sequences that start at position 0, without a cache (training, teacher forcing)."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    return Transformer(config).apply({"params": params}, tokens, positions)[0]  # pyright: ignore


def load_model(path: Path | str) -> Model:
    """Reads an exported model (bfloat16) and upcasts it to float32.

    Raises:
      FileNotFoundError: no such file.
      ValueError: the file is damaged, or holds something else than a model of this architecture.
    """
    params, meta = load_tree(path)
    try:
        config = Config(**meta["config"])
        expected = jax.eval_shape(lambda: init_params(config, 0))
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: not an exported model ({error!r})") from error
    shapes = jax.tree.map(lambda leaf: leaf.shape, params)
    if shapes != jax.tree.map(lambda leaf: leaf.shape, expected):
        raise ValueError(f"{path}: the parameters do not fit the sizes {config}")
    return make_model(config, jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), params))


def load_pair(folder: Path | str = CHECKPOINTS) -> tuple[Model, Model, Tokenizer]:
    """Returns the shipped target, draft and tokenizer.

    Raises:
      FileNotFoundError, ValueError: as `load_model`, or the three do not belong together.
    """
    folder = Path(folder)
    target, draft = load_model(folder / "target.npz"), load_model(folder / "draft.npz")
    tokenizer = load_tokenizer(folder / SHIPPED_TOKENIZER.name)
    sizes = {target.config.vocab_size, draft.config.vocab_size, tokenizer.vocab_size}
    if len(sizes) != 1:
        raise ValueError(f"{folder}: target, draft and tokenizer have different vocabularies: {sorted(sizes)}")
    return target, draft, tokenizer


def _sum_last(x):
    """Sum over the last axis, kept as size 1, always in the same order: halves onto halves.

    The order of a compiled reduction may depend on where a row lies in the batch (seen on CPU with 17 rows or more),
    and a request's logits must not.
    """
    while x.shape[-1] % 2 == 0:
        first, second = jnp.split(x, 2, axis=-1)
        x = first + second
    return sum(x[..., i : i + 1] for i in range(1, x.shape[-1])) + x[..., :1]


def _rotary(positions, head_size):
    """cos and sin [B, T, head_size/2] of the rotation angles."""
    half = head_size // 2
    frequencies = 10_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[:, :, None].astype(jnp.float32) * frequencies[None, None, :]
    return jnp.cos(angles), jnp.sin(angles)


def _rotate(x, angles):
    """Rotates the pairs (i, i + D/2) of x [B, T, H, D]."""
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = (jnp.broadcast_to(a[:, :, None, :], first.shape) for a in angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _write(cache, k, v, positions, valid):
    """Stores k, v [B, H, T, D] at their positions; padding and positions outside the cache are dropped."""
    length = cache[0].shape[2]
    # Negative indices would count from the end; both ends are sent to `length`, which "drop" ignores.
    kept = valid & (positions >= 0) & (positions < length)
    index = jnp.where(kept, positions, length)
    put = jax.vmap(lambda buffer, i, new: buffer.at[:, i].set(new, mode="drop"))
    return put(cache[0], index, k), put(cache[1], index, v)


def _attend(q, k, v, visible):
    """Softmax attention: q [B, T, Hq, D] over k, v [B, H, L, D], visible [B, T, L]; query heads share key heads."""
    batch, length, num_heads, size = q.shape
    groups = num_heads // k.shape[1]
    q = q.reshape(batch, length, k.shape[1], groups, size).transpose(0, 2, 3, 1, 4)
    q = q.reshape(batch, k.shape[1], groups * length, size) * size**-0.5
    scores = jnp.einsum("bhqd,bhld->bhql", q, k).reshape(batch, k.shape[1], groups, length, k.shape[2])
    mask = jnp.broadcast_to(visible[:, None, None], scores.shape)
    # Finite, so that a row without any visible position (outside the cache) gives numbers, not NaN.
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e30), axis=-1)
    out = jnp.einsum("bhql,bhld->bhqd", weights.reshape(batch, k.shape[1], groups * length, -1), v)
    return out.reshape(batch, k.shape[1], groups, length, size).transpose(0, 3, 1, 2, 4)
