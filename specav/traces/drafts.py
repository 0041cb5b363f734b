"""From a user's own arrays to labelled drafts, and from labelled drafts to the rounds an estimator learns from."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from specav._checks import one_of, shaped, static_int
from specav.features import FEATURES, DraftFeatures, draft_features
from specav.labels import RULES, Labels, num_tested_drafts, verification_labels
from specav.sampling import token_probability
from specav.verification import acceptance_probabilities, speculative_verify

_Any = Array | np.ndarray


class LabelledDrafts(NamedTuple):
    """Drafts in flat columns, one entry per draft: NumPy arrays [N]. `specav.traces.SCHEMA` documents every column.

    Rows are in the order in which an estimator may learn: by round, then by request, then by position.

    Attributes:
      request: int32, which request the draft belongs to, >= 0.
      round: int32, when it was drafted and verified, >= 0.
      position: int32, >= 0: 0 is the first draft after the committed tokens (the depth that intercepts belong to).
      logit_q_max, entropy, margin, log_collision, logit_q_sampled: float32, `specav.features.DraftFeatures`.
      q: float32, q(x), the draft law at the drafted token. 0 flags a draft that cannot come from the law given.
      p: float32, p(x), the target law at the drafted token. NaN without a target row, like the next two.
      a: float32, min(1, p(x) / q(x)), the acceptance probability of the token: a soft label.
      alpha: float32, sum_x min(p, q), the acceptance probability before the token is drawn: a soft label.
      accepted: bool, the draft and all before it passed. False where not observed.
      observed: bool, there is a verdict: the draft was tested and all before it passed.
      has_target_row: bool, p, a and alpha are known.
    """

    request: Int32[np.ndarray, " N"]
    round: Int32[np.ndarray, " N"]
    position: Int32[np.ndarray, " N"]
    logit_q_max: Float32[np.ndarray, " N"]
    entropy: Float32[np.ndarray, " N"]
    margin: Float32[np.ndarray, " N"]
    log_collision: Float32[np.ndarray, " N"]
    logit_q_sampled: Float32[np.ndarray, " N"]
    q: Float32[np.ndarray, " N"]
    p: Float32[np.ndarray, " N"]
    a: Float32[np.ndarray, " N"]
    alpha: Float32[np.ndarray, " N"]
    accepted: Bool[np.ndarray, " N"]
    observed: Bool[np.ndarray, " N"]
    has_target_row: Bool[np.ndarray, " N"]

    @property
    def features(self) -> DraftFeatures:
        """The feature columns by name, [N] each."""
        return DraftFeatures(**{name: getattr(self, name) for name in FEATURES})


class Rounds(NamedTuple):
    """Labelled drafts by round, for replay: feed `features` and `labels` to an estimator one round after the other.

    R rounds in increasing order, B the largest number of requests in a round, K positions. Empty slots are not
    observed, their features are 0, their probabilities NaN, their request -1.

    Attributes:
      features: `DraftFeatures`, float32 [R, B, K] each.
      labels: `Labels`, bool [R, B, K]: the verdicts.
      soft_labels: `Labels` with accepted = a, float32 [R, B, K]; observed wherever a is known, also behind a rejection.
      a: float32 [R, B, K]; alpha: float32 [R, B, K]. The ceilings.
      valid: bool [R, B, K], slots that hold a draft.
      request: int32 [R, B], -1 where there is none.
      round: int32 [R].
    """

    features: DraftFeatures
    labels: Labels
    soft_labels: Labels
    a: Float[Array, "R B K"]
    alpha: Float[Array, "R B K"]
    valid: Bool[Array, "R B K"]
    request: Int[Array, "R B"]
    round: Int[Array, " R"]


def from_logits(
    draft_tokens: Int[_Any, "*r B K"],
    draft_logits: Float[_Any, "*r B K V"] | None,
    target_logits: Float[_Any, "*r B K1 V"],
    *,
    num_drafts: Int[_Any, "*r B"] | None = None,
    num_verified: Int[_Any, "*r B"] | None = None,
    num_accepted: Int[_Any, "*r B"] | None = None,
    num_labelled: Int[_Any, "*r B"] | None = None,
    key: Array | None = None,
    rule: str = "coupled",
    features: DraftFeatures | None = None,
    request: Int[_Any, "..."] | None = None,
    round: int | Int[_Any, "..."] | None = None,
) -> LabelledDrafts:
    """Labelled drafts from drafted tokens and the logits of both models.

    A convenience for the host, not to be called under jit: the arrays are computed by one jitted function, one round
    at a time, and empty slots are then dropped, which depends on the data. Counts out of range are errors here, not
    clamped: they are a user's own, and a shift by one would spoil every label in silence.

    The verdicts are those of `num_accepted` where given; else, with `key`, those of a simulated verification; else
    there are none, and only the soft labels a and alpha are to be used.

    Args:
      draft_tokens: int [B, K], or [R, B, K] for R rounds; so for everything below.
      draft_logits: float [R, B, K, V], the processed logits the drafts were drawn from
        (`specav.sampling.process_logits`); None if every draft is a point mass (argmax, n-gram lookup).
      target_logits: float [R, B, K, V] or [R, B, K+1, V], processed; row i judges draft i.
      num_drafts: int [R, B], drafts that each request really has, 0..K. Default: K.
      num_verified: int [R, B], drafts fed to the target, 0..num_drafts; target rows 0..num_verified are read, and
        drafts behind them have no p, a and alpha. Default: num_drafts.
      num_accepted: int [R, B], drafts that passed, 0..number of tested drafts; without the token that the target adds.
      num_labelled: int [R, B], drafts up to the end of the output (end-of-sequence token, token limit); no verdict is
        observed beyond. Default: K.
      key: one JAX PRNG key; simulates the verdicts. Not together with `num_accepted`.
      rule: "standard", "coupled" or "deferred", see `specav.verification`. The deferred rule gives a round the same
        verdicts as the coupled one.
      features: float [R, B, K] each, all of them, where they do not come from `draft_logits`: a greedy drafter, say,
        whose drafts are point masses and whose features are those of its raw logits. Default: from `draft_logits`; a
        point mass has log-odds and margin of 40.
      request: int [B] or [R, B], >= 0. Default: the row in the batch.
      round: one int, int [R] or [R, B] ([B] without rounds), >= 0. Default: 0..R-1.

    Returns:
      `LabelledDrafts`, without empty slots, in the order round, row, position.

    Raises:
      TypeError, ValueError: wrong shapes or dtypes, counts or numbers out of range, an unknown rule, both
        `num_accepted` and `key`.

    References:
      Leviathan et al., Fast Inference from Transformers via Speculative Decoding, ICML 2023 (a and alpha).
    """
    one_of("rule", rule, RULES)
    if num_accepted is not None and key is not None:
        raise ValueError("key: expected None because num_accepted gives the verdicts, got both")
    lead = "R B" if np.ndim(draft_tokens) == 3 else "B"
    dims: dict[str, Any] = {}
    tokens = shaped(dims, "draft_tokens", draft_tokens, f"{lead} K", "int")
    if dims["K"] < 1:
        raise ValueError(f"draft_tokens: expected at least one position, got shape {list(tokens.shape)}")
    target = shaped(dims, "target_logits", target_logits, f"{lead} T V", "float")
    if dims["T"] - dims["K"] not in (0, 1) or dims["V"] < 1:
        rows = f"{dims['K']} or {dims['K'] + 1}"
        raise ValueError(f"target_logits: expected shape [{lead}, {rows}, V >= 1], got {list(target.shape)}")
    draft = None if draft_logits is None else shaped(dims, "draft_logits", draft_logits, f"{lead} K V", "float")
    if features is not None:
        features = _given_features(features, dims, lead)

    shape = tokens.shape[:-1]
    width = np.full(shape, dims["K"], np.int32)
    drafts = _count("num_drafts", num_drafts, shape, width, "K")
    verified = drafts if num_verified is None else _count("num_verified", num_verified, shape, drafts, "num_drafts")
    tested = num_tested_drafts(jnp.asarray(verified.reshape(-1)), jnp.asarray(drafts.reshape(-1)), rule)
    accepted = None
    if num_accepted is not None:
        accepted = _count("num_accepted", num_accepted, shape, np.asarray(tested).reshape(shape), "tested drafts")
    labelled = _count("num_labelled", num_labelled, shape, width, "K")

    if lead == "B":
        tokens, target, draft, drafts, verified, accepted, labelled, features = jax.tree.map(
            lambda x: x[None], (tokens, target, draft, drafts, verified, accepted, labelled, features)
        )
    # A deferred draft is graded when it is tested, as under the coupled rule.
    rule = "standard" if rule == "standard" else "coupled"
    requests, rounds = _numbers(request, round, tokens.shape[:2], shape)
    columns = _columns(
        tokens.astype(jnp.int32), draft, target, features, drafts, verified, accepted, labelled, key, rule
    )
    full = tokens.shape
    position = np.broadcast_to(np.arange(full[2], dtype=np.int32), full)
    columns |= {
        "request": np.broadcast_to(requests[..., None], full),
        "round": np.broadcast_to(rounds[..., None], full),
        "position": position,
    }
    kept = position < drafts[..., None]
    return LabelledDrafts(**{name: np.asarray(column)[kept] for name, column in columns.items()})


def to_rounds(drafts: LabelledDrafts, num_positions: int | None = None) -> Rounds:
    """Lays labelled drafts out by round, so that an estimator can predict and then learn, round by round.

    A host function: the shape of its result depends on the data. Rounds come in increasing order of their number and
    requests of a round in increasing order of theirs, whatever the order of the rows.

    Example:
      >>> rounds = to_rounds(drafts, num_positions=7)                                         # doctest: +SKIP
      >>> features = specav.stack_features(rounds.features, estimator.features)               # doctest: +SKIP
      >>> for r in range(rounds.round.shape[0]):                                              # doctest: +SKIP
      ...     labels = jax.tree.map(lambda x: x[r], rounds.labels)
      ...     probs = estimator.predict(state, features[r])
      ...     state, info = estimator.step(state, features[r], probs, labels)

    Args:
      drafts: at most one draft for each (request, round, position).
      num_positions: K, above every position. Default: one more than the largest position.

    Returns:
      `Rounds`.

    Raises:
      TypeError: `num_positions` is no int.
      ValueError: a position outside 0..K-1, or two drafts in one slot; the message gives the row.
    """
    position = np.asarray(drafts.position)
    width = (
        int(position.max(initial=-1)) + 1 if num_positions is None else static_int("num_positions", num_positions, 1)
    )
    outside = np.flatnonzero((position < 0) | (position >= width))
    if outside.size:
        raise ValueError(f"position: expected 0..{width - 1}, got {position[outside[0]]} in row {outside[0]}")
    rounds, which_round = np.unique(np.asarray(drafts.round), return_inverse=True)
    requests, which_request = np.unique(np.asarray(drafts.request), return_inverse=True)
    # One batch row for each request of a round: its rank among the round's (round, request) pairs.
    pairs, which_pair = np.unique(
        which_round.astype(np.int64) * max(len(requests), 1) + which_request, return_inverse=True
    )
    round_of_pair = pairs // max(len(requests), 1)
    row_of_pair = np.arange(len(pairs)) - np.searchsorted(round_of_pair, round_of_pair)
    num_rows = int(row_of_pair.max(initial=-1)) + 1
    slot = (which_round, row_of_pair[which_pair], position)
    shape = (len(rounds), num_rows, width)

    flat = np.ravel_multi_index(slot, shape) if len(position) else np.zeros(0, np.int64)
    _, first = np.unique(flat, return_index=True)
    if first.size < flat.size:
        row = int(np.setdiff1d(np.arange(flat.size), first)[0])
        names = ("request", "round", "position")
        raise ValueError(
            "drafts: expected one draft for each request, round and position, got a second one in row "
            f"{row} ({', '.join(f'{name} {getattr(drafts, name)[row]}' for name in names)})"
        )

    def spread(column, empty):
        column = np.asarray(column)
        grid = np.full(shape, empty, column.dtype)
        grid[slot] = column
        return jnp.asarray(grid)

    grid_of_requests = np.full(shape[:2], -1, np.int32)
    grid_of_requests[round_of_pair, row_of_pair] = requests[pairs % max(len(requests), 1)]
    a = spread(drafts.a, np.nan)
    return Rounds(
        features=DraftFeatures(**{name: spread(getattr(drafts, name), 0.0) for name in FEATURES}),
        labels=Labels(accepted=spread(drafts.accepted, False), observed=spread(drafts.observed, False)),
        soft_labels=Labels(accepted=a, observed=spread(drafts.has_target_row, False)),
        a=a,
        alpha=spread(drafts.alpha, np.nan),
        valid=spread(np.ones(position.shape, np.bool_), False),
        request=jnp.asarray(grid_of_requests),
        round=jnp.asarray(rounds.astype(np.int32)),
    )


def concatenate(parts: Sequence[LabelledDrafts]) -> LabelledDrafts:
    """All drafts of `parts`, in order.

    Raises:
      ValueError: no part.
    """
    if not parts:
        raise ValueError("parts: expected at least one LabelledDrafts, got none")
    return LabelledDrafts(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


@functools.partial(jax.jit, static_argnames="rule")
def _columns(tokens, draft, target, features, drafts, verified, accepted, labelled, key, rule):
    """Columns [R, B, K] by name, computed one round at a time so that temporaries stay those of a round."""
    width = tokens.shape[2]
    keys = None if key is None else jax.vmap(lambda r: jax.random.fold_in(key, r))(jnp.arange(tokens.shape[0]))

    def one_round(inputs):
        tokens, draft, target, features, drafts, verified, accepted, labelled, key = inputs
        column = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), tokens.shape)
        has_row = (column <= verified[:, None]) & (column < drafts[:, None])
        known = acceptance_probabilities(tokens, draft, target, drafts)
        if features is None:
            features = _features(tokens, draft, target.shape[-1])
        in_vocabulary = (tokens >= 0) & (tokens < target.shape[-1])
        q = in_vocabulary.astype(jnp.float32) if draft is None else token_probability(draft, tokens)
        if key is not None:
            # The bonus row bears no verdict: where there is none, any row will do.
            rows = target if target.shape[1] > width else jnp.concatenate([target, target[:, -1:]], axis=1)
            accepted = speculative_verify(key, tokens, draft, rows, drafts, verified, rule=rule).num_accepted
        if accepted is None:
            labels = Labels(jnp.zeros(tokens.shape, jnp.bool_), jnp.zeros(tokens.shape, jnp.bool_))
        else:
            tested = num_tested_drafts(verified, drafts, rule)
            labels = verification_labels(accepted, tested, width, num_labelled=labelled)
        return dict(
            **{name: getattr(features, name) for name in FEATURES},
            q=q,
            p=jnp.where(has_row, token_probability(target[:, :width], tokens), jnp.nan),
            a=jnp.where(has_row, known.token, jnp.nan),
            alpha=jnp.where(has_row, known.prefix, jnp.nan),
            accepted=labels.accepted & labels.observed,
            observed=labels.observed,
            has_target_row=has_row,
        )

    return jax.lax.map(one_round, (tokens, draft, target, features, drafts, verified, accepted, labelled, keys))


def _features(tokens, draft, vocabulary):
    """All features [B, K]; of a point mass they are those of a vocabulary of one token."""
    if draft is not None:
        return draft_features(draft, tokens)
    drawn = jnp.where((tokens >= 0) & (tokens < vocabulary), 0, -1)
    return draft_features(jnp.zeros((*tokens.shape, 1), jnp.float32), drawn)


def _given_features(features, dims, lead):
    """A user's features as float32."""
    if not isinstance(features, DraftFeatures) or any(column is None for column in features):
        raise TypeError(f"features: expected DraftFeatures with all of {', '.join(FEATURES)}, got {features!r}")
    named = zip(DraftFeatures._fields, features, strict=True)
    return DraftFeatures(
        *(shaped(dims, f"features.{n}", c, f"{lead} K", "float").astype(jnp.float32) for n, c in named)
    )


def _count(name, value, shape, most, most_name):
    """A count per request and round as int32, checked to lie in 0..most; `most` itself where not given."""
    if value is None:
        return most
    count = np.asarray(value)
    if not np.issubdtype(count.dtype, np.integer):
        raise TypeError(f"{name}: expected an integer dtype, got {count.dtype}")
    if count.shape != shape:
        raise ValueError(f"{name}: expected shape {list(shape)}, got {list(count.shape)}")
    wrong = np.argwhere((count < 0) | (count > most))
    if wrong.size:
        where = tuple(int(i) for i in wrong[0])
        raise ValueError(f"{name}: expected 0..{most[where]} ({most_name}), got {count[where]} at {list(where)}")
    return count.astype(np.int32)


def _numbers(request, round, full, given):
    """int32 request and round numbers of shape `full` = (R, B); `given` is (B,) where the user left the rounds out."""
    many = len(given) == 2
    request = np.arange(full[1]) if request is None else np.asarray(request)
    round = np.asarray((np.arange(full[0]) if many else 0) if round is None else round)
    for name, value, shapes in (("request", request, (full[1:], given)), ("round", round, ((), given[:1], given))):
        if not np.issubdtype(value.dtype, np.integer):
            raise TypeError(f"{name}: expected an integer dtype, got {value.dtype}")
        if value.shape not in shapes:
            expected = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
            raise ValueError(f"{name}: expected shape {expected}, got {list(value.shape)}")
        if value.size and not 0 <= value.min() <= value.max() < 2**31:
            raise ValueError(f"{name}: expected numbers in 0..2^31-1, got {value.min()}..{value.max()}")
    if many and round.ndim == 1:
        round = round[:, None]
    return np.broadcast_to(request, full).astype(np.int32), np.broadcast_to(round, full).astype(np.int32)
