"""A monitor of a running decoder: an alarm if emitted tokens favour what the drafter favours, or what it does not.

    monitor = lossless_monitor(level=0.01)
    watched = monitor.init()
    while ...:
        state, info = loop.step(state)                                 # specav.decode, or anything else
        watched = monitor.update(watched, *round_evidence(info))
    watched.alarm                                                      # exact decoders raise it with probability <= .01

It bets against exactness. The *null*: given the past, the next token y of a request has the target's law p. A bet pays
e = 1 + stake * g(y) per unit with |g| <= 1 and E_p g = 0, so its wealth is a nonnegative martingale that starts at 1,
and by Ville's inequality P(wealth ever reaches 1 / level) <= level: the monitor may be read after every round, and
decoding stopped because of it, without a correction. Wealth is spread over several bets (an average of martingales is
one). The one leak that all bets are modelled on: a draft x ~ q is *discarded* where w(x) = 1, and the token drawn
afresh from p, whereas a kept draft is tested as ever. The token then has the law

    p (1 + g),   g(y) = M + r Z - w(y) min(1, q/p)(y) - r max(1 - q/p, 0)(y),
    M = sum w min(p, q),   Z = sum max(p - q, 0),   r = sum w max(q - p, 0) / Z in [0, 1],

so that the bet with stake 1 on the true w grows as fast as any can (its e-value is the likelihood ratio); smaller
stakes fit leaks that touch a part of the drafts, negative ones leaks in the other direction. E_p g = 0 and |g| <= 1 for
*any* w in [0, 1] and r in [0, 1], hence validity does not hinge on the leak's model. Here w is 1 where the log-odds of
q(x) are below a threshold, for a row of thresholds; one more bet has g = (h - E_p h) / 2, h = (q - p) / (q + p), which
rises with q / p for whatever reason (a lenient test, a wrong draft law).

Half of the wealth is bet at once, the other half comes into play bit by bit, C / (C + n) of it is left after n
tokens: a leak that begins late is found almost as fast as an early one, however much the bets have lost until then.

Which tokens may be fed. Whether a row is fed may depend on the past, never on its own token or on a later one. In a
round: the token at slot i if it was emitted and has a draft law, as `round_evidence` selects them. This is valid under
the standard and coupled rules if every round is *jointly* exact over the batch, that is if the round's tokens,
continued by the target, follow the target jointly given everything before the round: E of the product over a round is
then 1 although its length is random. A policy that couples requests through live drafts keeps every request's law and
bends the joint one, which may raise the alarm; so may, rightly, a decoder that is exact per request only. Under the
deferred rule the tokens are exact in the filtration of one request's own tokens, but a policy that peeks decides which
request advances: watch requests one by one there (`jax.vmap` of `update`), or peek not.

References:
  Ville, Etude critique de la notion de collectif, 1939. Shafer, Testing by betting, JRSS A 184, 2021.
  Waudby-Smith and Ramdas, Estimating means of bounded random variables by betting, JRSS B 86, 2024.
  Herbster and Warmuth, Tracking the best expert, Machine Learning 32, 1998 (wealth held back for late changes).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from specav import _sums
from specav._checks import shaped, static_float
from specav.decode import RoundInfo
from specav.sampling import law

_BLOCK = 256
# Taken off each e-value per unit of stake. Sums of up to 2^18 terms below err by 1e-6 in E g, and a token drawn from
# float32 weights by 1e-6 in law (`specav.randomness.categorical`): with this E e <= 1 in spite of both.
_SLACK = 4e-6
_HELD_BACK = 1000.0  # C, tokens
_MAX_LOG_FACTOR, _MAX_WEALTH = 80.0, 1e30  # caps lose wealth, hence are safe


class Bet(NamedTuple):
    """One of the bets.

    Attributes:
      threshold: drafts of lower log-odds q(x) are believed to be discarded; None: the bet on q / p.
      stake: share of its wealth that it puts on it; negative: on the opposite.
    """

    threshold: float | None
    stake: float


class MonitorState(NamedTuple):
    """State of a monitor, of constant size.

    Attributes:
      wealth: float32 [bets], in units of all wealth at the start.
      reserve: float32 [], wealth not in play yet.
      num_tokens: int32 [], tokens that were bet on.
      num_impossible: int32 [], tokens beside them to which the target gives probability 0.
      total: float32 [], wealth and reserve.
      maximum: float32 [], of `total` since the start; min(1, 1 / maximum) is a p-value at any time.
      alarm: bool [], `maximum` has reached 1 / level, or an impossible token was emitted. Never falls back.
    """

    wealth: Float[Array, " bets"]
    reserve: Float[Array, ""]
    num_tokens: Int[Array, ""]
    num_impossible: Int[Array, ""]
    total: Float[Array, ""]
    maximum: Float[Array, ""]
    alarm: Bool[Array, ""]


class LosslessMonitor(NamedTuple):
    """A monitor as pure functions.

    Attributes:
      init: () -> MonitorState.
      update: (MonitorState, target_probs float [..., V], draft_probs float [..., V], tokens int [...], mask bool [...]
        or None) -> MonitorState. Each row is one emitted token, the law it was promised and the law of the draft at its
        place (of the same prefix). Rows are skipped where `mask` is False, where either law is none (NaN, or a sum that
        is not 1 within 1e-3: no draft there), and where the token is outside 0..V-1. The alarm is judged once per
        call, after all its rows.
      bets: what each entry of `wealth` is staked on: `monitor.bets[state.wealth.argmax()]` says what leaks.
    """

    init: Callable[[], MonitorState]
    update: Callable[..., MonitorState]
    bets: tuple[Bet, ...]


def lossless_monitor(
    level: float = 0.01,
    *,
    thresholds: Sequence[float] = (-8.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 4.0),
    stakes: Sequence[float] = (0.75, 0.25, 0.0625, -0.0625, -0.25, -0.75),
) -> LosslessMonitor:
    """An anytime-valid test that emitted tokens follow the target, against leaks that follow the drafter.

    Args:
      level: bound on the probability that an exact decoder ever raises the alarm.
      thresholds: log-odds of q(x) below which a leaking policy may discard a draft.
      stakes: in [-.9, .9], not 0. Every threshold and the bet on q / p is played at each of them.

    Returns:
      A `LosslessMonitor`.

    Raises:
      TypeError, ValueError: a level outside (0, 1), a threshold that is not finite, a stake out of range, or no stake.
    """
    level = static_float("level", level, 0.0, 1.0)
    if level in (0.0, 1.0):
        raise ValueError(f"level: expected a number strictly between 0 and 1, got {level}")
    levels = [static_float("thresholds", value, -1e30, 1e30) for value in thresholds]
    shares = np.asarray([static_float("stakes", value, -0.9, 0.9) for value in stakes], np.float32)
    if not shares.size or not shares.all():
        raise ValueError(f"stakes: expected numbers other than 0, got {list(stakes)}")
    bets = tuple(Bet(threshold, float(share)) for threshold in (*levels, None) for share in shares)
    # q(x) < cut is "log-odds below the threshold".
    cuts = np.asarray(1 / (1 + np.exp(-np.asarray(levels, np.float64))), np.float32)

    def init() -> MonitorState:
        one, zero = jnp.ones((), jnp.float32), jnp.zeros((), jnp.int32)
        wealth = jnp.full((len(bets),), 0.5 / len(bets), jnp.float32)
        return MonitorState(wealth, one / 2, zero, zero, one, one, jnp.zeros((), jnp.bool_))

    def update(
        state: MonitorState,
        target_probs: Float[Array, "*b V"],
        draft_probs: Float[Array, "*b V"],
        tokens: Int[Array, "*b"],
        mask: Bool[Array, "*b"] | None = None,
    ) -> MonitorState:
        p, q, tokens, mask = _checked(target_probs, draft_probs, tokens, mask)
        score, fed, impossible = _scores(p, q, tokens, mask, cuts)
        stake = jnp.asarray(shares)[None, None, :]
        log_e = jnp.log1p(stake * score[:, :, None] - _SLACK * jnp.abs(stake))
        log_factor = jnp.sum(jnp.where(fed[:, None, None], log_e, 0.0), axis=0).reshape(-1)
        wealth = jnp.minimum(state.wealth * jnp.exp(jnp.minimum(log_factor, _MAX_LOG_FACTOR)), _MAX_WEALTH)
        total = state.reserve + jnp.sum(wealth)
        maximum = jnp.maximum(state.maximum, total)
        num_impossible = state.num_impossible + jnp.sum(impossible, dtype=jnp.int32)

        # What leaves the reserve depends on how many tokens there were, and is bet on later ones only.
        num_fed = jnp.sum(fed, dtype=jnp.int32)
        num_tokens = state.num_tokens + num_fed
        released = state.reserve * (num_fed.astype(jnp.float32) / (_HELD_BACK + num_tokens.astype(jnp.float32)))
        return MonitorState(
            wealth=wealth + released / len(bets),
            reserve=state.reserve - released,
            num_tokens=num_tokens,
            num_impossible=num_impossible,
            total=total,
            maximum=maximum,
            alarm=state.alarm | (maximum >= 1 / level) | (num_impossible > 0),
        )

    return LosslessMonitor(init, update, bets)


def round_evidence(
    info: RoundInfo,
) -> tuple[Float[Array, "B K1 V"], Float[Array, "B K1 V"], Int[Array, "B K1"], Bool[Array, "B K1"]]:
    """What one round of `specav.decode` tells a monitor: (target_probs, draft_probs, tokens, mask).

    Row i is the token emitted at slot i, the target's law there and the law of draft i+1 (point masses: the guess).
    Slots that were not emitted, or that have no draft (the bonus after a block that was accepted whole), are masked.

    Args:
      info: of `Decoder.step`.
    """
    block = info.block
    target = law(info.target_logits)
    vocabulary = target.shape[-1]
    if block.logits is None:
        draft = jax.nn.one_hot(block.tokens, vocabulary, dtype=jnp.float32)
    else:
        draft = law(block.logits)
    draft = jnp.concatenate([draft, jnp.zeros_like(draft[:, :1])], axis=1)
    slots = jnp.broadcast_to(jnp.arange(target.shape[1], dtype=jnp.int32), target.shape[:2])
    mask = slots < jnp.minimum(info.num_committed, block.num_drafts)[:, None]
    return target, draft, info.result.tokens, mask


def discarding_law(
    target_probs: Float[Array, "*b V"], draft_probs: Float[Array, "*b V"], discard: Float[Array, "*b V"]
) -> Float[Array, "*b V"]:
    """The law of a token whose draft x ~ q is discarded with probability w(x), and then drawn afresh from p.

    (1 - w) min(p, q) + [sum (1 - w) max(q - p, 0)] max(p - q, 0) / Z + [sum w q] p: what the standard rule emits at the
    first position under a policy that looks at the draft itself. Equal to p for constant w.

    Args:
      target_probs, draft_probs: p and q, float [..., V].
      discard: w, float [..., V] in [0, 1].

    Returns:
      Probabilities [..., V], in the dtype of p.
    """
    p, q, w = target_probs, draft_probs, discard
    residual = jnp.maximum(p - q, 0)
    mass = jnp.sum(residual, axis=-1, keepdims=True)
    rejected = jnp.sum((1 - w) * jnp.maximum(q - p, 0), axis=-1, keepdims=True)
    redrawn = jnp.sum(w * q, axis=-1, keepdims=True)
    return (1 - w) * jnp.minimum(p, q) + residual * rejected / jnp.where(mass > 0, mass, 1) + redrawn * p


def _checked(target_probs, draft_probs, tokens, mask):
    """The arguments of an update as rows: float32 [N, V] twice, int [N], bool [N]."""
    dims: dict[str, Any] = {}
    p = shaped(dims, "target_probs", target_probs, "... V", "float").astype(jnp.float32)
    q = shaped(dims, "draft_probs", draft_probs, "... V", "float").astype(jnp.float32)
    tokens = shaped(dims, "tokens", tokens, "...", "int")
    mask = jnp.ones(tokens.shape, jnp.bool_) if mask is None else shaped(dims, "mask", mask, "...", "bool")
    return p.reshape(-1, p.shape[-1]), q.reshape(-1, q.shape[-1]), tokens.reshape(-1), mask.reshape(-1)


def _scores(p, q, tokens, mask, cuts):
    """g(y) of every bet [N, thresholds + 1], the rows to bet on [N], and those that hit a token of p = 0 [N]."""
    sums = _vocabulary_sums(p, q, cuts)
    mass, draft_mass, residual, ratio = (sums[:, i, None] for i in range(4))
    overlap, excess = jnp.split(sums[:, 4:], 2, axis=1)
    inside = (tokens >= 0) & (tokens < p.shape[1])
    is_law = (jnp.abs(mass[:, 0] - 1) < 1e-3) & (jnp.abs(draft_mass[:, 0] - 1) < 1e-3)  # false for NaN
    fed = mask & inside & is_law

    at = jnp.where(inside, tokens, 0)[:, None]
    p_y, q_y = jnp.take_along_axis(p, at, axis=1), jnp.take_along_axis(q, at, axis=1)
    likelihood = q_y / jnp.where(p_y > 0, p_y, 1.0)
    # E_p g = 0 for any share in [0, 1]; the right one makes the bet the likelihood ratio of its leak.
    share = jnp.where(residual > 0, jnp.minimum(excess / jnp.where(residual > 0, residual, 1.0), 1.0), 0.0)
    centre = (overlap + share * residual) / mass
    discarded = (q_y < cuts[None, :]).astype(jnp.float32)
    score = centre - discarded * jnp.minimum(likelihood, 1.0) - share * jnp.maximum(1 - likelihood, 0.0)
    leaning = (_lean(p_y, q_y) - ratio / mass) / 2
    return jnp.concatenate([score, leaning], axis=1), fed & (p_y[:, 0] > 0), fed & (p_y[:, 0] <= 0)


def _vocabulary_sums(p, q, cuts):
    """Sums over the vocabulary, [N, 4 + 2 thresholds]: p, q, max(p - q, 0), p h; then min(p, q) and max(q - p, 0), of
    the tokens below each cut. Blocks are added by halves and to one another with compensation: 1e-6 for any V.
    """
    width = min(_BLOCK, 1 << max(p.shape[1] - 1, 0).bit_length())
    blocks = [jnp.pad(x, [(0, 0), (0, -x.shape[1] % width)]).reshape(len(x), -1, width) for x in (p, q)]
    p_blocks, q_blocks = (jnp.moveaxis(x, 1, 0) for x in blocks)
    cut = jnp.asarray(cuts)[None, :, None]

    def add_block(pair, block):
        p, q = (x[:, None, :] for x in block)
        below = q < cut
        terms = [p, q, jnp.maximum(p - q, 0.0), p * _lean(p, q)]
        terms += [jnp.where(below, jnp.minimum(p, q), 0.0), jnp.where(below, jnp.maximum(q - p, 0.0), 0.0)]
        x = jnp.concatenate(terms, axis=1)
        while x.shape[-1] > 1:
            first, second = jnp.split(x, 2, axis=-1)
            x = first + second
        return _sums.add(pair, x[..., 0]), None

    zeros = jnp.zeros((len(p), 4 + 2 * len(cuts)), jnp.float32)
    (high, low), _ = jax.lax.scan(add_block, (zeros, zeros), (p_blocks, q_blocks))
    return high + low


def _lean(p, q):
    """h = (q - p) / (q + p) in [-1, 1], 0 where both vanish."""
    total = p + q
    return (q - p) / jnp.where(total > 0, total, 1.0)
