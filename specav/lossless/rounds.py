"""One round of speculative decoding in every possible world: draft, decide, test, learn, emit.

The round is that of `specav.decode`, written again: where the decoder draws at random, worlds are split and weights
multiplied, in float64 NumPy. Only the policy, the estimator and the features are the library's own code.

For a request with drafts x_1..x_K of laws q_i, target laws p_i and num_verified = n:

* t = n drafts are tested (standard rule), or min(n + 1, K) (coupled and deferred rule, on the free row);
* x_i passes with probability a_i = min(1, p_i(x_i) / q_i(x_i)); m of t are accepted before the first rejection;
* m < t adds a token of the residual law of p_{m+1}; m = t = n adds a bonus token of p_{m+1}; m = t = n + 1 adds none.
"""

from typing import Any, NamedTuple

import numpy as np

from specav.estimators.base import AcceptanceEstimator
from specav.lossless.decisions import StateCodec, decisions, feature_tables, lessons
from specav.lossless.scheme import Scheme, acceptance, drawn_law, residual_weights, tested_law
from specav.lossless.tabular import Model
from specav.lossless.worlds import (
    Block,
    Tables,
    Worlds,
    branch,
    distinct_rows,
    distinct_states,
    empty_block,
    merge,
    take,
)
from specav.policies import Policy


class Setting(NamedTuple):
    """What does not change from round to round.

    Attributes:
      policy, estimator, draft, target, scheme, rule, refill: as in `specav.lossless.exact_output_law`. The estimator is
        None where no decision reads it.
      prompts: int32 [M, R, P].
      num_drafts: int32 [R], drafts per block.
      width: K.
      num_tokens: n, tokens that are followed.
      vocabulary: V.
      names: features that are computed.
      forgets: fields among last_accepted, last_tested that no decision reads.
      policy_codec, estimator_codec: of the states.
    """

    policy: Policy
    estimator: AcceptanceEstimator | None
    draft: Model
    target: Model
    scheme: Scheme
    rule: str
    refill: str
    prompts: np.ndarray
    num_drafts: np.ndarray
    width: int
    num_tokens: int
    vocabulary: int
    names: tuple[str, ...]
    forgets: tuple[str, ...]
    policy_codec: StateCodec
    estimator_codec: StateCodec | None


class Played(NamedTuple):
    """What a round made of some worlds.

    Attributes:
      finished: worlds in which every request has its n tokens.
      going_on: the others; those that agree from now on are merged.
      tables: states of the others.
      num_paths: rows before merging.
    """

    finished: Worlds
    going_on: Worlds
    tables: Tables
    num_paths: int


def play_round(setting: Setting, worlds: Worlds, tables: Tables) -> Played:
    """All worlds one round later."""
    worlds = draw_drafts(setting, worlds)
    worlds, tables = decide(setting, worlds, tables)
    worlds = judge_drafts(setting, worlds)
    worlds, tables = learn(setting, worlds, tables)
    worlds = emit_tokens(setting, worlds)
    unfinished = worlds.active.any(axis=1)
    going_on = merge(next_blocks(setting, take(worlds, unfinished)))
    return Played(take(worlds, ~unfinished), going_on, tables, len(worlds.weight))


def draw_drafts(setting: Setting, worlds: Worlds) -> Worlds:
    """Tops the kept drafts up to a block, in every way that has a positive probability."""
    kept = worlds.block.num_drafts
    wanted = np.broadcast_to(setting.num_drafts[None, :], kept.shape)
    if setting.refill == "block":  # nothing is redrafted before a block and its bonus are spent
        wanted = np.where((kept > 0) | worlds.owes_bonus, kept, wanted)
    num_new = np.where(worlds.active, np.maximum(wanted - kept, 0), 0).astype(np.int32)
    worlds = worlds._replace(block=worlds.block._replace(num_new=num_new))
    for request in range(kept.shape[1]):
        worlds = _draw_request(setting, worlds, request)
    return worlds


def decide(setting: Setting, worlds: Worlds, tables: Tables) -> tuple[Worlds, Tables]:
    """Predictions for the new drafts, and what the policy wants verified."""
    block = worlds.block
    slots = np.arange(setting.width)
    is_old = slots < (block.num_drafts - block.num_new)[..., None]
    given = {
        "features": block.features,
        "draft_tokens": block.tokens,
        "num_drafts": block.num_drafts,
        "active": worlds.active,
        "num_drafting": (block.num_new > 0).sum(axis=1, dtype=np.int32),  # kept drafts cost nothing to draft
        "last_accepted": worlds.last_accepted,
        "last_tested": worlds.last_tested,
        "acceptance": block.acceptance,
        "is_new": ~is_old & (slots < block.num_drafts[..., None]),
        "depth": _depth(worlds, setting.width),
    }
    function = decisions(setting.policy, setting.estimator, setting.names)
    policy_leaves = setting.policy_codec.unpack(tables.policy[worlds.policy_state])
    num_verified, predicted, *leaves = function(policy_leaves, _estimator_leaves(setting, worlds, tables), given)
    states, policy_state = distinct_states(setting.policy_codec.pack(leaves, len(worlds.weight)))
    return worlds._replace(
        block=block._replace(acceptance=predicted),
        num_verified=np.clip(num_verified, 0, block.num_drafts),
        policy_state=policy_state,
    ), tables._replace(policy=states)


def judge_drafts(setting: Setting, worlds: Worlds) -> Worlds:
    """Tests drafts in order until one is rejected: sets last_tested and last_accepted."""
    n, num_drafts = worlds.num_verified, worlds.block.num_drafts
    tested = n if setting.rule == "standard" else np.minimum(n + 1, num_drafts)
    worlds = worlds._replace(last_tested=tested, last_accepted=np.zeros_like(tested))
    for request in range(tested.shape[1]):
        worlds, _, accepted = branch(worlds, _law_of_num_accepted(setting, worlds, request))
        worlds.last_accepted[:, request] = accepted
    return worlds


def learn(setting: Setting, worlds: Worlds, tables: Tables) -> tuple[Worlds, Tables]:
    """Teaches the estimator the verdicts, where anything is still to be decoded."""
    emitted = worlds.last_accepted + _adds_token(worlds)
    going_on = np.nonzero((worlds.active & (worlds.lengths + emitted < setting.num_tokens)).any(axis=1))[0]
    if setting.estimator is None or not len(going_on):
        return worlds, tables
    pupils = take(worlds, going_on)
    given = {
        "features": pupils.block.features,
        "acceptance": pupils.block.acceptance,
        "num_accepted": pupils.last_accepted,
        "num_tested": pupils.last_tested,
        "depth": _depth(pupils, setting.width),
    }
    leaves = lessons(setting.estimator, setting.names)(_estimator_leaves(setting, pupils, tables), given)
    assert setting.estimator_codec is not None
    states, rows = distinct_states(setting.estimator_codec.pack(leaves, len(going_on)))
    estimator_state = np.zeros_like(worlds.estimator_state)
    estimator_state[going_on] = rows
    return worlds._replace(estimator_state=estimator_state), tables._replace(estimator=states)


def emit_tokens(setting: Setting, worlds: Worlds) -> Worlds:
    """Commits accepted drafts and the token that the target adds; tokens beyond n are not followed."""
    for request in range(setting.prompts.shape[1]):
        worlds = _commit_accepted(setting, worlds, request)
        adds = _adds_token(worlds)[:, request] & worlds.active[:, request]
        worlds, rows, token = branch(worlds, _choices(adds, _added_law(setting, worlds, request), setting))
        _append_token(worlds, request, token, adds[rows])
    return worlds


def next_blocks(setting: Setting, worlds: Worlds) -> Worlds:
    """What is carried to the next round: kept drafts (deferred rule), an owed bonus, the last verdicts."""
    block, tested, accepted = worlds.block, worlds.last_tested, worlds.last_accepted
    rows = block.num_drafts.shape
    nothing = empty_block(rows, setting.width, setting.vocabulary, block.features.shape[-1])
    kept, owes_bonus = nothing, worlds.owes_bonus
    if setting.rule == "deferred":
        passed = worlds.active & (accepted == tested)  # a rejection discards what was not tested
        num_kept = np.where(passed, block.num_drafts - tested, 0).astype(np.int32)
        source = np.minimum(np.arange(setting.width) + tested[..., None], setting.width - 1)
        is_kept = np.arange(setting.width) < num_kept[..., None]
        kept = Block(*(_shifted(old, source, is_kept, empty) for old, empty in zip(block, nothing, strict=True)))
        kept = kept._replace(num_drafts=num_kept, num_new=nothing.num_new)
        if setting.refill == "block":
            owes_bonus = passed & (num_kept == 0) & ~_adds_token(worlds)
    forgotten = {name: nothing.num_new for name in ("num_verified", *setting.forgets)}
    return worlds._replace(block=kept, owes_bonus=owes_bonus, **forgotten)


def last_round(setting: Setting, worlds: Worlds) -> Worlds:
    """Ends all requests at once: kept drafts are all tested, and missing tokens are drawn from the target."""
    worlds = worlds._replace(num_verified=worlds.block.num_drafts)
    worlds = emit_tokens(setting, judge_drafts(setting, worlds))
    for request in range(setting.prompts.shape[1]):
        while worlds.active[:, request].any():
            active = worlds.active[:, request]
            law = setting.scheme.target(setting.target(*_sequence(setting, worlds, request, 0)))
            worlds, rows, token = branch(worlds, _choices(active, law, setting))
            _append_token(worlds, request, token, active[rows])
    return worlds


def _draw_request(setting: Setting, worlds: Worlds, request: int) -> Worlds:
    """Draws the new drafts of one request, one after the other."""
    scheme, parallel = setting.scheme, None
    if scheme.drafter == "parallel":  # all laws before any draw
        parallel = setting.draft(*_sequence(setting, worlds, request))
    for index in range(int(worlds.block.num_new[:, request].max(initial=0))):
        draws = worlds.block.num_new[:, request] > index
        raw = setting.draft(*_sequence(setting, worlds, request)) if parallel is None else parallel[:, index]
        raw = np.asarray(raw, np.float64)
        drawn, believed = drawn_law(scheme, raw), tested_law(scheme, raw)
        features = _features(setting, raw, drawn)
        worlds, rows, token = branch(worlds, _choices(draws, drawn, setting))
        parallel = None if parallel is None else parallel[rows]
        draws, block = np.nonzero(draws[rows])[0], worlds.block
        column = block.num_drafts[draws, request]
        block.tokens[draws, request, column] = token[draws]
        block.laws[draws, request, column] = believed[rows[draws]]
        block.features[draws, request, column] = features[rows[draws], token[draws]]
        block.origin[draws, request, column] = worlds.lengths[draws, request]
        block.num_drafts[draws, request] += 1
    return worlds


def _features(setting, raw, drawn):
    """Features float32 [N, V, F] of every token that could be drawn.

    They describe the law of the drafts; where that is a point mass, the softmax of the raw logits.
    """
    if not setting.names:
        return np.zeros((*raw.shape, 0), np.float32)
    with np.errstate(divide="ignore"):
        logs = np.log(drawn)
    certain = (drawn == 1).any(axis=-1, keepdims=True)
    seen = np.where(certain, raw - raw.max(axis=-1, keepdims=True), logs).astype(np.float32)
    first, inverse = distinct_rows([seen])
    return feature_tables(setting.names)(seen[first])[0][inverse]


def _law_of_num_accepted(setting, worlds, request):
    """P(m drafts are accepted), float64 [N, K+1]: a_1 ... a_m (1 - a_{m+1}), without the last factor for m = t."""
    block, tested = worlds.block, worlds.last_tested[:, request]
    probability = np.zeros((len(tested), setting.width + 1))
    reached = np.ones(len(tested))
    for index in range(int(tested.max(initial=0))):
        rows = np.nonzero(tested > index)[0]
        p = setting.scheme.target(setting.target(*_sequence(setting, take(worlds, rows), request, index)))
        token = block.tokens[rows, request, index]
        each = np.arange(len(rows))
        a = acceptance(p[each, token], block.laws[rows, request, index, token])
        probability[rows, index] = reached[rows] * (1 - a)
        reached[rows] *= a
    probability[np.arange(len(tested)), tested] += reached
    return probability


def _added_law(setting, worlds, request):
    """The law of the token added behind the accepted drafts, float64 [N, V]: residual, or target."""
    p = setting.scheme.target(setting.target(*_sequence(setting, worlds, request, 0)))
    accepted, tested = worlds.last_accepted[:, request], worlds.last_tested[:, request]
    q = worlds.block.laws[np.arange(len(p)), request, np.minimum(accepted, setting.width - 1)]
    return np.where((accepted < tested)[:, None], residual_weights(setting.scheme, p, q), p)


def _adds_token(worlds):
    """Whether the target adds a token to the accepted drafts, bool [N, R]: residual or bonus."""
    rejected = worlds.last_accepted < worlds.last_tested
    return rejected | (worlds.last_tested == worlds.num_verified)


def _commit_accepted(setting, worlds, request):
    """Appends the accepted drafts of one request."""
    worlds = worlds._replace(tokens=worlds.tokens.copy(), lengths=worlds.lengths.copy())
    accepted = worlds.last_accepted[:, request]
    for index in range(int(accepted.max(initial=0))):
        _append_token(worlds, request, worlds.block.tokens[:, request, index], accepted > index)
    return worlds


def _append_token(worlds, request, token, where):
    """Appends one token per world to a request, in place; those beyond n are dropped."""
    rows = np.nonzero(where & worlds.active[:, request])[0]
    worlds.tokens[rows, request, worlds.lengths[rows, request]] = token[rows]
    worlds.lengths[rows, request] += 1


def _choices(where, law, setting):
    """Probabilities [N, V] of the next token; rows without a draw have one choice, token 0."""
    certain = np.eye(1, setting.vocabulary)
    return np.where(where[:, None], law, certain)


def _sequence(setting, worlds, request, num_drafts=None):
    """What a model is given: prompt, emitted tokens, first drafts (default all); int32 [N, L] and lengths [N]."""
    prompts = setting.prompts[worlds.batch, request]
    count, start = prompts.shape
    tokens = np.full((count, start + setting.num_tokens + setting.width), -1, np.int32)
    tokens[:, :start] = prompts
    tokens[:, start : start + setting.num_tokens] = worlds.tokens[:, request]
    lengths = start + worlds.lengths[:, request].astype(np.int64)
    drafts = worlds.block.num_drafts[:, request]
    drafts = drafts if num_drafts is None else np.minimum(drafts, num_drafts)
    for index in range(int(drafts.max(initial=0))):
        rows = np.nonzero(drafts > index)[0]
        tokens[rows, lengths[rows] + index] = worlds.block.tokens[rows, request, index]
    return tokens, lengths + drafts


def _depth(worlds, width):
    """Each draft's 0-based position within the block it was drawn in, int32 [N, R, K], as in `specav.decode`."""
    position = worlds.lengths[..., None] + np.arange(width, dtype=np.int32)
    return np.clip(position - worlds.block.origin, 0, width - 1).astype(np.int32)


def _estimator_leaves(setting: Setting, worlds: Worlds, tables: Tables) -> list[Any]:
    if setting.estimator_codec is None:
        return []
    return setting.estimator_codec.unpack(tables.estimator[worlds.estimator_state])


def _shifted(values, source, is_kept, empty):
    """Columns moved to the front where kept; arrays without a slot axis are returned as they are."""
    if values.ndim < 3:
        return values
    trailing = (1,) * (values.ndim - 3)
    moved = np.take_along_axis(values, source.reshape(*source.shape, *trailing), axis=2)
    return np.where(is_kept.reshape(*is_kept.shape, *trailing), moved, empty)
