"""Drafters: how a decoding loop gets its draft tokens, and what it demands of a model.

Draft and target are pure functions of the user with a state of their own (a KV cache, a table, nothing):

    logits, state = model(state, tokens, positions, num_tokens)

tokens int32 [B, T] stand at absolute positions positions[b] .. positions[b] + T - 1; only the first num_tokens[b] are
real. The model returns logits float [B, T, V], row t conditioned on everything up to token t, and must satisfy:

* the cache is indexed by absolute position, and a token sees cache entries at its own position and before only, so
  that stale entries (of rejected drafts, of rows beyond num_tokens) are overwritten before they are ever read: this
  is what makes roll-back free;
* writes beyond the cache's length are dropped (positions may point there on purpose);
* a request's rows do not depend on its batch-mates.

Both models hold at most the committed tokens but the last, which is fed again with the next drafts.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specav._checks import static_int
from specav.features import DraftFeatures, draft_features
from specav.sampling import SamplingParams, process_logits


@runtime_checkable
class Model(Protocol):
    """A language model as a pure function; see the module's docstring for what it must satisfy."""

    def __call__(
        self, state: Any, tokens: Int[Array, "B T"], positions: Int[Array, " B"], num_tokens: Int[Array, " B"], /
    ) -> tuple[Float[Array, "B T V"], Any]:
        """Returns logits [B, T, V] and the new state."""
        ...


class DraftContext(NamedTuple):
    """What a drafter is told.

    Attributes:
      tokens: int32 [B, L], the sequence so far: committed tokens, then kept drafts (deferred rule); beyond: anything.
      lengths: int32 [B], its length.
      num_new: int32 [B], how many drafts to add, 0..K.
    """

    tokens: Int[Array, "B L"]
    lengths: Int[Array, " B"]
    num_new: Int[Array, " B"]


class Drafter(NamedTuple):
    """A proposer of draft tokens, as pure functions.

    Attributes:
      prefill: (state, prompts int32 [B, P], lengths int32 [B]) -> state.
      propose: (state, context: DraftContext, draw) -> (tokens int32 [B, K], logits float [B, K, V] or None, state).
        `draw(logits [B, V], i) -> tokens int32 [B]` draws the i-th new draft of every request from raw logits with
        the right temperature and noise; logits returned are the raw ones. None: the drafts are point masses, and
        `draw` is not used.
      kind: "autoregressive" (q_j is a function of the drafts before j; Markov heads included), "parallel" (every q_j
        is known before any draw) or "point_mass". It decides what a policy may read.
    """

    prefill: Callable[..., Any]
    propose: Callable[..., Any]
    kind: str


def autoregressive_drafter(model: Model, num_draft_tokens: int) -> Drafter:
    """A separate draft model that is run once per draft token.

    The first call feeds the last two tokens of the sequence: whatever was accepted, at most these are missing from the
    draft's cache (the last draft of a fully accepted block was never fed). The number of calls is the largest number
    of new drafts in the batch, decided on the device.

    Args:
      model: see the module's docstring.
      num_draft_tokens: K.

    Raises:
      TypeError, ValueError: K is not an int of at least 1.
    """
    width = static_int("num_draft_tokens", num_draft_tokens, 1)

    def prefill(state, prompts, lengths):
        return model(state, prompts, jnp.zeros_like(lengths), lengths)[1]

    def propose(state, context, draw):
        batch, room = context.tokens.shape
        active = context.num_new > 0
        start = jnp.maximum(context.lengths - 2, 0)
        window = jnp.minimum(start[:, None] + jnp.arange(2, dtype=jnp.int32)[None, :], room - 1)
        pair = jnp.maximum(jnp.take_along_axis(context.tokens, window, axis=1), 0)
        num_fed = jnp.minimum(context.lengths, 2)
        # A request that drafts nothing feeds beyond its sequence: its cache stays bitwise as it is.
        logits, state = model(state, pair, jnp.where(active, start, context.lengths), jnp.where(active, num_fed, 0))
        row = jnp.take_along_axis(logits, (num_fed - 1)[:, None, None], axis=1)[:, 0]
        first = draw(row, jnp.zeros((), jnp.int32))
        tokens = jnp.full((batch, width), -1, jnp.int32).at[:, 0].set(first)
        all_logits = jnp.zeros((batch, width, row.shape[-1]), row.dtype).at[:, 0].set(row)

        def body(index, carry):
            state, tokens, all_logits = carry
            previous = jax.lax.dynamic_index_in_dim(tokens, index - 1, axis=1)
            more = (index < context.num_new).astype(jnp.int32)
            logits, state = model(state, previous, context.lengths + index - 1, more)
            token = draw(logits[:, 0], index)
            tokens = jax.lax.dynamic_update_index_in_dim(tokens, token, index, axis=1)
            all_logits = jax.lax.dynamic_update_index_in_dim(all_logits, logits[:, 0], index, axis=1)
            return state, tokens, all_logits

        # int32 bounds: the loop index is a token position.
        steps = jnp.max(context.num_new)
        state, tokens, all_logits = jax.lax.fori_loop(jnp.ones((), jnp.int32), steps, body, (state, tokens, all_logits))
        return tokens, all_logits, state

    return Drafter(prefill, propose, "autoregressive")


def parallel_drafter(prefill: Callable[..., Any], laws: Callable[..., Any], num_draft_tokens: int) -> Drafter:
    """A drafter whose K laws are all known before any token is drawn (block-parallel heads, tables).

    Args:
      prefill: (state, prompts int32 [B, P], lengths int32 [B]) -> state.
      laws: (state, context: DraftContext) -> (raw logits float [B, K, V], state); row i is the law of the i-th new
        draft, at absolute position lengths + i.
      num_draft_tokens: K.

    Raises:
      TypeError, ValueError: K is not an int of at least 1.
    """
    width = static_int("num_draft_tokens", num_draft_tokens, 1)

    def propose(state, context, draw):
        logits, state = laws(state, context)
        draws = [draw(logits[:, i], jnp.asarray(i, jnp.int32)) for i in range(width)]
        return jnp.stack(draws, axis=1), logits, state

    return Drafter(prefill, propose, "parallel")


def point_mass_drafter(prefill: Callable[..., Any], guess: Callable[..., Any]) -> Drafter:
    """A drafter that guesses tokens without a law (n-gram lookup, argmax of any model).

    Each guess is accepted with probability p(x): the draft law is a point mass, never the softmax it came from.

    Args:
      prefill: (state, prompts int32 [B, P], lengths int32 [B]) -> state.
      guess: (state, context: DraftContext) -> (tokens int32 [B, K], state).
    """

    def propose(state, context, draw):
        del draw  # nothing is random
        tokens, state = guess(state, context)
        return tokens, None, state

    return Drafter(prefill, propose, "point_mass")


def features_of_drafts(
    raw: Float[Array, "B K V"] | None,
    tokens: Int[Array, "B K"],
    sampling: SamplingParams,
    names: tuple[str, ...],
) -> tuple[DraftFeatures, Float[Array, "B K V"] | None]:
    """Features of drafts, and the processed logits (the law) they were drawn from.

    Args:
      raw: raw draft logits, None for point masses.
      tokens: the drafts.
      sampling: what made the law of the raw logits.
      names: features to compute.

    Returns:
      Features [B, K] of the law; at temperature 0 of the unscaled logits, since the law is a point mass there.
      Processed logits [B, K, V], or None.
    """
    if raw is None:  # point masses are certain of themselves: nothing to learn from, but defined
        certain = {name: 0.0 if name in ("entropy", "log_collision") else 40.0 for name in names}
        filled = {name: jnp.full(tokens.shape, value, jnp.float32) for name, value in certain.items()}
        return DraftFeatures(**dict.fromkeys(DraftFeatures._fields) | filled), None
    processed = process_logits(raw, sampling)
    # At temperature 0 the draft is a point mass, and its features are those of the unscaled logits.
    temperature = jnp.asarray(sampling.temperature, jnp.float32)
    greedy = (temperature <= 0).reshape(temperature.shape + (1,) * (raw.ndim - temperature.ndim))
    seen = jnp.where(greedy, raw.astype(jnp.float32), processed)
    return draft_features(seen, tokens, names=names), processed
