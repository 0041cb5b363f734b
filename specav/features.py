"""Features of a draft: what the draft model's own logits say about whether the target will accept it.

With q the law the draft was sampled from, every feature is one number per row of logits. They are computed over blocks
of the vocabulary, so that no float32 copy of the logits is ever made, and from sums that *leave the maximum out*
rather than subtract it: float32 `sum - 1` has no digits left once q_max is within 1e-7 of 1, log-odds of 16.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specav import _sums
from specav._checks import one_of, shaped

# Log-odds and margins are clamped to +-MAX_LOG_ODDS.
MAX_LOG_ODDS = 40.0


class FeatureSpec(NamedTuple):
    """A feature and what it reads.

    Attributes:
      name: field of `DraftFeatures`.
      depends_on: "prefix", a function of the draft law alone, known before the token is drawn; or "draw", a function
        of the drawn token too. What a policy may read depends on it (`specav.policies.require_lossless`).
      doc: one line.
    """

    name: str
    depends_on: str
    doc: str


FEATURES: dict[str, FeatureSpec] = {
    spec.name: spec
    for spec in (
        FeatureSpec("logit_q_max", "prefix", "log-odds of the most likely token, log q_max - log(1 - q_max)"),
        FeatureSpec("entropy", "prefix", "entropy of the draft law in nats, -sum q log q"),
        FeatureSpec("margin", "prefix", "largest logit minus second largest"),
        FeatureSpec("log_collision", "prefix", "log of the probability that two draws agree, log sum q^2"),
        FeatureSpec("logit_q_sampled", "draw", "log-odds of the drawn token, log q(x) - log(1 - q(x))"),
    )
}


class DraftFeatures(NamedTuple):
    """Features by name, float32 [...] each; None where not asked for.

    Attributes:
      logit_q_max: log q_max - log(1 - q_max), in [-40, 40]; at least -log(V - 1).
      entropy: nats, in [0, log V].
      margin: z_(1) - z_(2), in [0, 40].
      log_collision: log sum q^2, in [-log V, 0].
      logit_q_sampled: log q(x) - log(1 - q(x)), in [-40, 40].
    """

    logit_q_max: Float[Array, "*b"] | None = None
    entropy: Float[Array, "*b"] | None = None
    margin: Float[Array, "*b"] | None = None
    log_collision: Float[Array, "*b"] | None = None
    logit_q_sampled: Float[Array, "*b"] | None = None


def draft_features(
    logits: Float[Array, "*b V"],
    tokens: Int[Array, "*b"] | None = None,
    *,
    temperature: float | Float[Array, "*t"] = 1.0,
    names: Sequence[str] | None = None,
) -> DraftFeatures:
    """Features of each row of draft logits.

    The law is q = softmax(z / temperature). Temperature 0 is greedy drafting, where the draft is a point mass; the
    features then come from the unscaled logits. The vocabulary is read twice, in blocks: for the two largest logits,
    then for compensated sums relative to the maximum. Only what `names` needs is computed.

    -inf (a masked token; NaN and the most negative float32 count as it) has probability 0, +inf entries share a point
    mass. Of tied maxima one copy is left out of the complement, the others stay in. One-hot rows and V = 1 have
    logit_q_max 40, margin 40, entropy 0, log_collision 0. A row of -inf alone names no law: its log-odds are -40, the
    rest 0. A drawn token that is masked or outside 0..V-1 (padding) has log-odds -40.

    Args:
      logits: float32, bfloat16 or float16 [..., V]; top-k, top-p and token masks as -inf.
      tokens: int [...], the drawn tokens; needed by draw features only.
      temperature: one number, or float with a shape that begins the leading axes of `logits` (one value per
        request); dimensionless, values <= 0 count as 0.
      names: features wanted, static. Default: all prefix features, and logit_q_sampled if `tokens` is given.

    Returns:
      `DraftFeatures`, float32 [...], accurate to 1e-5 of max(|value|, .1) for log-odds and margin and to a relative
      1e-5 for entropy and log_collision.

    Raises:
      TypeError: wrong dtypes, or `names` is no sequence of strings.
      ValueError: wrong shapes, an unknown or repeated name, or a draw feature without `tokens`.

    References:
      Agrawal et al., AdaEDL: Early Draft Stopping for Speculative Decoding via an Entropy-based Lower Bound, 2024.
    """
    if names is None:
        names = tuple(n for n, spec in FEATURES.items() if tokens is not None or spec.depends_on == "prefix")
    names = _checked_names(names)
    dims: dict[str, Any] = {}
    logits = shaped(dims, "logits", logits, "... V", "float")
    if logits.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise TypeError(f"logits: expected float32, bfloat16 or float16, got {logits.dtype}")
    if dims["V"] < 1:
        raise ValueError(f"logits: expected shape [..., V] with V >= 1, got {list(logits.shape)}")
    if "logit_q_sampled" in names:
        if tokens is None:
            raise ValueError("tokens: expected int [...] because names asks for 'logit_q_sampled', got None")
        tokens = shaped({}, "tokens", tokens, "...", "int")
        if tokens.shape != logits.shape[:-1]:
            raise ValueError(f"tokens: expected shape {list(logits.shape[:-1])}, got {list(tokens.shape)}")
    return _features(logits, tokens, _per_row_temperature(temperature, logits.shape[:-1]), names)


def stack_features(features: DraftFeatures, names: Sequence[str]) -> Float[Array, "*b"]:
    """The array that estimators take: features in the order of `names`.

    Args:
      features: with every named field present, all of one shape [...].
      names: static.

    Returns:
      float32 [...] for one name, else [..., d].

    Raises:
      TypeError, ValueError: bad names, or a named feature that was not computed.
    """
    names = _checked_names(names)
    if not names:
        raise ValueError("names: expected at least one feature, got none")
    columns = [getattr(features, name) for name in names]
    missing = [name for name, column in zip(names, columns, strict=True) if column is None]
    if missing:
        raise ValueError(f"features: expected {', '.join(names)}, got none for {', '.join(missing)}")
    return columns[0] if len(columns) == 1 else jnp.stack(columns, axis=-1)


def feature_class(names: Sequence[str]) -> str:
    """What a set of features depends on: "draw" if any of them does, else "prefix". Raises as `stack_features`."""
    return "draw" if any(FEATURES[name].depends_on == "draw" for name in _checked_names(names)) else "prefix"


# Stands for -inf, so that differences of two masked logits are 0 and not NaN.
_FLOOR = -float(jnp.finfo(jnp.float32).max)
# exp(_LOWEST) is 0 in float32; keeps 0 * -inf out of the sums.
_LOWEST = -200.0


@functools.partial(jax.jit, static_argnames="names")
def _features(logits, tokens, temperature, names):
    """`draft_features` on checked arguments; compiled once per shape also where the caller does not."""
    inverse = _inverse(temperature)
    first, second = _two_largest(logits, "margin" in names)
    lives = first > _FLOOR
    wanted: dict[str, Array] = {}
    if second is not None:
        gap = _scaled_gap(second, first, inverse)[0]
        wanted["margin"] = jnp.where(lives, jnp.minimum(0.0 - gap, MAX_LOG_ODDS), 0.0)
    if set(names) - {"margin"}:
        sums = _sums_without_maximum(logits, first, inverse, "entropy" in names, "log_collision" in names)
        rest, log_total = sums["mass"], jnp.log1p(sums["mass"])
        if "logit_q_max" in names:
            wanted["logit_q_max"] = jnp.where(lives, jnp.minimum(-jnp.log(rest), MAX_LOG_ODDS), -MAX_LOG_ODDS)
        if "entropy" in names:
            # log Z - sum q d with d = z - max <= 0: both terms are positive, nothing cancels near a one-hot row.
            wanted["entropy"] = jnp.where(lives, log_total + sums["gap"] / (1.0 + rest), 0.0)
        if "log_collision" in names:
            # sum q^2 = (1 + squares) / (1 + rest)^2 and squares <= rest, so the difference loses no digits either.
            wanted["log_collision"] = jnp.where(lives, jnp.log1p(sums["square"]) - 2.0 * log_total, 0.0)
        if "logit_q_sampled" in names:
            wanted["logit_q_sampled"] = _sampled_log_odds(logits, tokens, first, rest, inverse)
    return DraftFeatures(**wanted)


def _checked_names(names):
    """`names` as a tuple of known, distinct feature names."""
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise TypeError(f"names: expected a tuple of feature names, got {names!r}")
    for name in names:
        one_of("names", name, FEATURES)
    if len(set(names)) < len(names):
        raise ValueError(f"names: expected distinct features, got {', '.join(names)}")
    return tuple(names)


def _per_row_temperature(temperature, leading):
    """Positive float32 temperature per row [...]; 1 where the temperature is 0."""
    value = shaped({}, "temperature", temperature, "...", "real").astype(jnp.float32)
    if value.shape != leading[: value.ndim]:
        begins = f"a scalar or a shape that begins {list(leading)}"
        raise ValueError(f"temperature: expected {begins}, got {list(value.shape)}")
    value = jnp.broadcast_to(value.reshape(value.shape + (1,) * (len(leading) - value.ndim)), leading)
    # The bounds keep masked logits masked and equal logits equal at any temperature.
    return jnp.where(value > 0, jnp.clip(value, 1e-30, 1e30), 1.0)


def _block_width(vocabulary):
    """Lanes per step. A few dozen floats per lane are alive at a time: keep that small beside the row itself."""
    return min(vocabulary, max(256, 1 << (max(vocabulary // 256, 1).bit_length() - 1)))


def _fold_blocks(logits, step, init):
    """Folds `step(carry, z, fresh)` over blocks of the vocabulary.

    `z` is a float32 block [..., L] with masked entries at _FLOOR, and `fresh` bool [1..., L] marks entries not seen
    before: the last block is moved back so that it fits.
    """
    vocabulary = logits.shape[-1]
    width = _block_width(vocabulary)
    bits = jnp.uint32 if logits.dtype.itemsize == 4 else jnp.uint16

    def body(block, carry):
        start = jnp.minimum(block * width, vocabulary - width)
        # Some compilers turn a slice of bfloat16 into a float32 copy of the whole array and hoist it out of the loop.
        # Slicing integers, behind a barrier that ties them to this iteration, keeps the conversion in the block.
        whole, start = jax.lax.optimization_barrier((logits, start))
        part = jax.lax.dynamic_slice_in_dim(jax.lax.bitcast_convert_type(whole, bits), start, width, axis=-1)
        z = jax.lax.bitcast_convert_type(part, logits.dtype).astype(jnp.float32)
        fresh = start + jnp.arange(width, dtype=jnp.int32) >= block * width
        return step(carry, _tame(z), fresh.reshape((1,) * (z.ndim - 1) + (width,)))

    num_blocks = -(-vocabulary // width)
    if num_blocks == 1:
        z = _tame(logits.astype(jnp.float32))
        return step(init, z, jnp.ones((1,) * (z.ndim - 1) + (width,), jnp.bool_))
    return jax.lax.fori_loop(0, num_blocks, body, init)


def _tame(z):
    """float32 logits without NaN and infinities; their order and ties stay."""
    return jnp.clip(jnp.where(jnp.isnan(z), -jnp.inf, z), _FLOOR, -_FLOOR)


def _two_largest(logits, with_second):
    """The largest and the second largest logit of each row, [...]; equal if tied, _FLOOR where there is none."""
    lanes = jnp.full((*logits.shape[:-1], _block_width(logits.shape[-1])), _FLOOR)

    def step(carry, z, fresh):
        first, second = carry
        z = jnp.where(fresh, z, _FLOOR)
        if with_second:
            second = jnp.maximum(second, jnp.minimum(first, z))
        return jnp.maximum(first, z), second

    lane_first, lane_second = _fold_blocks(logits, step, (lanes, lanes if with_second else None))
    first = jnp.max(lane_first, axis=-1, keepdims=True)
    if lane_second is None:
        return first[..., 0], None
    is_first = lane_first == first
    runners = jnp.maximum(jnp.where(is_first, _FLOOR, lane_first), lane_second)
    tied = jnp.sum(is_first, axis=-1, dtype=jnp.int32) > 1
    return first[..., 0], jnp.where(tied, first[..., 0], jnp.max(runners, axis=-1))


def _inverse(temperature):
    """1 / temperature as high + low, where high has 12 bits and the sum about 36."""
    inverse = 1.0 / temperature
    high, t_high = _upper_bits(inverse), _upper_bits(temperature)
    low, t_low = inverse - high, temperature - t_high
    missing = ((1.0 - t_high * high) - t_high * low - t_low * high) - t_low * low  # 1 - temperature * inverse
    return high, low + missing * inverse


def _upper_bits(x):
    """`x` cut to 12 significant bits: products of two such numbers are exact."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFFF000)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _scaled_gap(z, first, inverse):
    """(z - first) / temperature <= 0 in float32, and the factor that corrects its exp for the rounding.

    `z` and `first` float32 [...], `inverse` the pair of `_inverse` [...]. At V = 150k log-odds may be near 0 while
    every other token lies 12 below the maximum: rounding 12 costs 5e-7 to 1e-6, all of the tolerance.
    """
    high, low = inverse
    gap, lost = _sums.two_sum(z, -first)
    gap_high = _upper_bits(gap)
    main = gap_high * high  # exact
    minor = gap_high * low + (gap - gap_high) * (high + low)
    scaled = main + minor
    lost = lost * high + (minor - (scaled - main))
    ordinary = scaled > _LOWEST  # false for NaN too, which masked logits give
    return jnp.where(ordinary, scaled, _LOWEST), jnp.where(ordinary, 1.0 + lost, 0.0)


def _sums_without_maximum(logits, first, inverse, with_gap, with_square):
    """Sums over all tokens but one copy of the maximum, with e = exp(d), d = (z - max) / temperature.

    Returns a dict of [...]: "mass" = sum e, and if asked for "gap" = sum -d e, "square" = sum e^2.
    """
    first, inverse = first[..., None], (inverse[0][..., None], inverse[1][..., None])
    zeros = jnp.zeros((*logits.shape[:-1], _block_width(logits.shape[-1])), jnp.float32)
    kept = ["mass", *(["gap"] if with_gap else []), *(["square"] if with_square else [])]

    def step(carry, z, fresh):
        copies, sums = carry
        scaled, correction = _scaled_gap(z, first, inverse)
        e = jnp.where(fresh & (z < first) & (z > _FLOOR), jnp.exp(scaled) * correction, 0.0)
        terms = {"mass": e, "gap": -scaled * e, "square": e * e}
        copies = copies + (fresh & (z == first)).astype(jnp.float32)
        return copies, {name: _sums.add(sums[name], terms[name]) for name in kept}

    copies, sums = _fold_blocks(logits, step, (zeros, {name: (zeros, zeros) for name in kept}))
    ties = jnp.sum(copies, axis=-1) - 1.0  # counts, exact below 2^24; e = 1 and d = 0 for each
    return {name: _sums.total(*sums[name]) + (0.0 if name == "gap" else ties) for name in kept}


def _sampled_log_odds(logits, tokens, first, rest, inverse):
    """Log-odds of the drawn token. If it is not the maximum, the maximum (1) stays in its complement."""
    inside = (tokens >= 0) & (tokens < logits.shape[-1])
    index = jnp.where(inside, tokens, 0)[..., None]
    z = _tame(jnp.take_along_axis(logits, index, axis=-1)[..., 0].astype(jnp.float32))
    scaled, correction = _scaled_gap(z, first, inverse)
    log_e = scaled + jnp.log(correction)
    e = jnp.exp(scaled) * correction
    # 1 + (rest - e) >= 1 loses no digits, for e <= 1. A copy of the maximum leaves itself out: rest.
    odds = jnp.where(z == first, -jnp.log(rest), log_e - jnp.log1p(jnp.maximum(rest - e, 0.0)))
    return jnp.where(inside & (z > _FLOOR), jnp.clip(odds, -MAX_LOG_ODDS, MAX_LOG_ODDS), -MAX_LOG_ODDS)
