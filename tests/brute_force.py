"""Speculative decoding of one batch as a plain program, run over every sequence of its random choices.

Written apart from `specav.lossless.rounds`: no arrays over worlds, no weights, no merging. `decode` is an ordinary
sampler in Python lists that asks `choose(probabilities)` wherever it needs chance; `every_run` replays it once for
each way that the choices may come out. Slow, and hard to get wrong.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specav.features import FEATURES, DraftFeatures, draft_features
from specav.labels import Labels
from specav.policies import PolicyInputs


class Game(NamedTuple):
    """What is decoded, and how.

    `draft` and `target` map a list of tokens to raw logits (parallel drafters: a list of them). `draft_law`,
    `tested_law` (what the verifier takes for it; default the same) and `target_law` map a tuple of logits to a law.
    """

    policy: Any
    draft: Any
    target: Any
    rule: str
    prompts: tuple[tuple[int, ...], ...]
    num_drafts: tuple[int, ...]
    width: int
    num_tokens: int
    kind: str = "autoregressive"
    draft_law: Any = None
    tested_law: Any = None
    target_law: Any = None
    estimator: Any = None
    refill: str = "block"
    num_rounds: int | None = None


class Draft(NamedTuple):
    token: int
    law: list[float]
    features: dict[str, float]
    prediction: float
    origin: int


def on_lists(model):
    """A model of `exact_output_law` as a function of one list of tokens, remembered."""

    @functools.cache
    def rows(context):
        return model(np.asarray([context]), np.asarray([len(context)]))[0].tolist()

    return lambda context: rows(tuple(context))


def brute_force_law(game, vocabulary):
    """The joint law float64 [V^n, ..., V^n] of the first n tokens of every request."""
    law = np.zeros([vocabulary**game.num_tokens] * len(game.prompts))
    calls = _calls(game.policy, game.estimator)
    for outputs, probability in every_run(lambda choose: decode(game, calls, choose)):
        index = tuple(sum(x * vocabulary**i for i, x in enumerate(reversed(tokens))) for tokens in outputs)
        law[index] += probability
    return law


def every_run(program):
    """Yields (result, probability) for every way in which the program's choices of positive probability may fall."""
    path = []  # [choices that remain, ...] of the present run
    while True:
        depth, weight = 0, 1.0

        def choose(probabilities):
            nonlocal depth, weight
            if depth == len(path):
                path.append([i for i, p in enumerate(probabilities) if p > 0])
            taken = path[depth][0]
            depth, weight = depth + 1, weight * probabilities[taken]
            return taken

        yield program(choose), weight
        while path and len(path[-1]) == 1:
            path.pop()
        if not path:
            return
        path[-1].pop(0)


def decode(game, calls, choose):
    """Decodes a batch until every request has its tokens; returns them as tuples."""
    requests = range(len(game.prompts))
    outputs: list[list[int]] = [[] for _ in requests]
    kept: list[list[Draft]] = [[] for _ in requests]
    owes = [False for _ in requests]
    last = [(0, 0) for _ in requests]
    state = game.policy.init()
    learned = None if game.estimator is None else game.estimator.init()
    rounds = 0
    while any(len(out) < game.num_tokens for out in outputs) and rounds != game.num_rounds:
        rounds += 1
        active = [len(out) < game.num_tokens for out in outputs]
        blocks, num_new = [], []
        for r in requests:
            block = list(kept[r])
            if active[r] and not (game.refill == "block" and (block or owes[r])):
                block += new_drafts(game, calls, learned, choose, r, outputs[r], block, game.num_drafts[r] - len(block))
            blocks.append(block)
            num_new.append(len(block) - len(kept[r]))
        verified, state = calls.decide(state, policy_inputs(game, blocks, num_new, active, last))
        verified = [min(max(int(n), 0), len(block)) for n, block in zip(verified, blocks, strict=True)]
        before = [len(out) for out in outputs]
        for r in requests:
            last[r], rejected, added = verdict(game, choose, r, outputs[r], blocks[r], verified[r], active[r])
            untested = blocks[r][last[r][1] :]
            unfinished = len(outputs[r]) < game.num_tokens
            kept[r] = untested if game.rule == "deferred" and not rejected and unfinished else []
            owes[r] = bool(blocks[r]) and not kept[r] and not added and unfinished and game.rule == "deferred"
            owes[r] = owes[r] and game.refill == "block"
        if learned is not None:
            learned = calls.step(learned, *lesson(game, blocks, before, last))
    for r in requests:  # the end: test what was kept, then the target alone
        if len(outputs[r]) < game.num_tokens:
            if kept[r]:
                verdict(game, choose, r, outputs[r], kept[r], len(kept[r]), True)
            while len(outputs[r]) < game.num_tokens:
                outputs[r].append(choose(target_row(game, r, outputs[r])))
    return [tuple(out[: game.num_tokens]) for out in outputs]


def new_drafts(game, calls, learned, choose, r, output, kept, number):
    """Draws `number` drafts behind the kept ones."""
    context = [*game.prompts[r], *output, *(draft.token for draft in kept)]
    rows = game.draft(context) if game.kind == "parallel" else None
    found = []
    for i in range(number):
        raw = game.draft(context) if rows is None else rows[i]
        law = list(game.draft_law(tuple(raw)))
        if game.kind == "point_mass":
            law = [float(j == law.index(max(law))) for j in range(len(law))]
        believed = law if game.tested_law is None else list(game.tested_law(tuple(raw)))
        token = choose(law)
        features = calls.features(tuple(raw), tuple(law), token)
        prediction = calls.predict(learned, features, len(kept) + i)
        found.append(Draft(token, believed, features, prediction, len(output)))
        context = [*context, token]
    return found


def verdict(game, choose, r, output, block, verified, active):
    """Tests drafts, appends to the output; returns ((accepted, tested), rejected, whether the target added a token)."""
    if not active:
        return (0, 0), False, True
    tested = verified if game.rule == "standard" else min(verified + 1, len(block))
    for i in range(tested):
        p, (x, q) = target_row(game, r, output), block[i][:2]
        a = min(1.0, p[x] / q[x]) if q[x] > 0 else 0.0
        if choose([1 - a, a]) == 0:
            weights = [max(u - v, 0.0) for u, v in zip(p, q, strict=True)]
            total = sum(weights)
            output.append(choose([w / total for w in weights] if total > 0 else p))
            return (i, tested), True, True
        output.append(x)
    if tested == verified:
        output.append(choose(target_row(game, r, output)))
    return (tested, tested), False, tested == verified


def target_row(game, r, output):
    return list(game.target_law(tuple(game.target([*game.prompts[r], *output]))))


def policy_inputs(game, blocks, num_new, active, last):
    """`PolicyInputs` of a round, padded to K."""
    acceptance = padded(game, [[d.prediction for d in block] for block in blocks], 0.0)
    survival = np.minimum.accumulate(np.cumprod(acceptance, axis=1, dtype=np.float32), axis=1)
    number = np.asarray([len(block) for block in blocks], np.int32)
    return PolicyInputs(
        features=DraftFeatures(
            **{n: padded(game, [[d.features[n] for d in block] for block in blocks], 0.0) for n in FEATURES}
        ),
        draft_tokens=padded(game, [[d.token for d in block] for block in blocks], -1),
        num_drafts=number,
        acceptance=acceptance,
        survival=survival,
        active=np.asarray(active),
        num_drafting=np.asarray(sum(n > 0 for n in num_new), np.int32),
        last_accepted=np.asarray([a for a, _ in last], np.int32),
        last_tested=np.asarray([t for _, t in last], np.int32),
    )


def lesson(game, blocks, before, last):
    """What the estimator is told: features, predictions, verdicts of the tested drafts, depths."""
    names = game.estimator.features
    columns = [padded(game, [[d.features[n] for d in block] for block in blocks], 0.0) for n in names]
    features = columns[0] if len(names) == 1 else np.stack(columns, axis=-1)
    depth = [[start + i - d.origin for i, d in enumerate(b)] for start, b in zip(before, blocks, strict=True)]
    accepted = padded(game, [[i < a for i in range(game.width)] for a, _ in last], False)
    observed = padded(game, [[i < min(a + 1, t) for i in range(game.width)] for a, t in last], False)
    acceptance = padded(game, [[d.prediction for d in block] for block in blocks], 0.0)
    return features, acceptance, Labels(accepted, observed), padded(game, depth, 0)


def padded(game, rows, fill):
    """Lists of numbers as an array [R, K], filled up; float32, int32 or bool as `fill` is."""
    dtype = {float: np.float32, int: np.int32, bool: np.bool_}[type(fill)]
    return np.asarray([[*row, *[fill] * (game.width - len(row))] for row in rows], dtype)


class _Calls(NamedTuple):
    decide: Any
    step: Any
    predict: Any
    features: Any


def _calls(policy, estimator):
    """The library's functions for one batch, remembered by their arguments."""

    def remembered(function):
        jitted, known = jax.jit(function), {}

        def call(*arguments):
            leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(arguments)]
            key = b"|".join(leaf.tobytes() for leaf in leaves)
            if key not in known:
                known[key] = jax.tree.map(np.asarray, jitted(*arguments))
            return known[key]

        return call

    @functools.cache
    def features(raw, law, token):
        sure = max(law) == 1
        seen = [z - max(raw) for z in raw] if sure else [math.log(p) if p > 0 else -math.inf for p in law]
        found = draft_features(jnp.asarray(seen, jnp.float32), jnp.asarray(token, jnp.int32))
        return {name: float(value) for name, value in found._asdict().items()}

    def step(state, features, acceptance, labels, depth):
        return estimator.step(state, features, acceptance, labels, depth=depth)[0]

    def predict(state, features, depth):
        if estimator is None:
            return float(jax.nn.sigmoid(np.float32(features["logit_q_max"])))
        row = np.asarray([[features[n] for n in estimator.features]], np.float32)
        row = row if len(estimator.features) == 1 else row[None]
        return float(predicted(state, row, np.full((1, 1), depth, np.int32))[0, 0])

    predicted = remembered(lambda state, row, depth: estimator.predict(state, row, depth=depth))
    return _Calls(remembered(policy.decide), remembered(step), predict, features)
