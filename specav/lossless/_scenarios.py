"""Random draft models for the anticipation check: rounds of decoding in which anything unrevealed can be drawn anew.

A scenario is one round of one batch. Its draft laws come from a pool of rows, and which row is the law of a slot
depends on the slot and, for autoregressive drafters, on the draft before it. Everything a policy sees is looked up in
tables of (row, token): where laws and tokens are equal, features and predictions are equal bit for bit, whatever was
drawn elsewhere. Host side, NumPy; only the features themselves are `specav.draft_features`.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from specav.features import FEATURES, DraftFeatures, draft_features
from specav.lossless.scheme import Scheme
from specav.policies import PolicyInputs

_ROWS = 64  # laws in the pool of a scenario
# How a token is proposed: from its law, uniformly, the most likely one, the least likely one; the one with the best
# prospects (survival summed over the rest of the block), the one with the worst. Whatever has positive probability may
# happen, so that a decision must not change under any of them. The last two move sums over a batch the most.
PROPOSALS = 6
BEST, WORST = 4, 5


class Scenarios(NamedTuple):
    """S rounds of batches of B requests and K slots over a vocabulary of V, with pools of L laws.

    Attributes:
      row_of: int [S, B, K, V], which law of the pool a slot has, by the draft before it (0 for the first slot).
      features: by name, float32 [S, L, V]; prefix features are constant along V.
      acceptance: float32 [S, K, L, V], an estimator's predictions.
      possible: bool [S, L, V], tokens of positive probability.
      cumulative: float64 [4, S, L, V], distribution functions of the first four proposals.
      chosen: int [2, S, B, K, V], tokens of the last two, by the draft before.
      num_drafts, last_accepted, last_tested: int32 [S, B]; active: bool [S, B].
      num_base_tokens, num_sampling, num_drafting: int32 [S].
    """

    row_of: np.ndarray
    features: dict[str, np.ndarray]
    acceptance: np.ndarray
    possible: np.ndarray
    cumulative: np.ndarray
    chosen: np.ndarray
    num_drafts: np.ndarray
    active: np.ndarray
    last_accepted: np.ndarray
    last_tested: np.ndarray
    num_base_tokens: np.ndarray
    num_sampling: np.ndarray
    num_drafting: np.ndarray


def random_scenarios(
    rng: np.random.Generator,
    shape: tuple[int, int, int, int],
    scheme: Scheme,
    acceptance_depends_on: str,
    last_accepted: np.ndarray,
    last_tested: np.ndarray,
) -> Scenarios:
    """Draws S rounds: laws from near-uniform to one-hot, ties, ragged and nearly empty batches, various predictions.

    Args:
      rng: source of randomness.
      shape: S, B, K, V.
      scheme: `drawn` makes laws of raw logits, `drafter` says whether they depend on earlier drafts.
      acceptance_depends_on: "prefix", or "draw" for predictions that read the drawn token's own probability.
      last_accepted, last_tested: int32 [S, B], verdicts of the round before.
    """
    count, batch, width, vocabulary = shape
    laws = scheme.drawn(_random_logits(rng, count, vocabulary))
    logits = np.log(laws, where=laws > 0, out=np.full(laws.shape, -np.inf)).astype(np.float32)
    features = _feature_tables(logits)
    # Few laws make ties between requests, many make every request its own.
    distinct = rng.choice([3, _ROWS, _ROWS, _ROWS], size=(count, 1, 1, 1))
    row_of = rng.integers(0, distinct, (count, batch, width, vocabulary))
    if scheme.drafter != "autoregressive":
        row_of = np.broadcast_to(row_of[..., :1], row_of.shape)
    acceptance = _random_acceptance(rng, features, acceptance_depends_on, width)
    num_drafts, active = _random_lengths(rng, count, batch, width)
    working = active.sum(axis=1).astype(np.int32)
    other_tokens = rng.choice([0, 0, 0, 1, 4], count) * rng.integers(0, max(batch, 64), count)
    return Scenarios(
        row_of=row_of,
        features=features,
        acceptance=acceptance,
        possible=laws > 0,
        cumulative=_proposals(laws),
        chosen=_best_and_worst(row_of, acceptance, laws > 0),
        num_drafts=num_drafts,
        active=active,
        last_accepted=last_accepted,
        last_tested=last_tested,
        num_base_tokens=working + other_tokens.astype(np.int32),
        num_sampling=working,
        num_drafting=(num_drafts > 0).sum(axis=1).astype(np.int32),
    )


def draw(
    rng: np.random.Generator,
    scenarios: Scenarios,
    which: np.ndarray,
    tokens: np.ndarray,
    redrawn: np.ndarray,
    proposal: np.ndarray,
) -> np.ndarray:
    """Draws tokens anew, one position after the other, each from the law that follows from what is before it.

    A token that is not to be drawn anew stays, unless it has become impossible. Slots beyond num_drafts hold token 0.

    Args:
      which: int [N], the scenario of each block.
      tokens: int [N, B, K], what stays.
      redrawn: bool [N, B, K], what is drawn.
      proposal: int, broadcasts to [N, B, K], 0..PROPOSALS-1.

    Returns:
      int [N, B, K].
    """
    tokens = tokens.copy()
    scenario, proposal = which[:, None], np.broadcast_to(proposal, tokens.shape)
    uniform = rng.random(tokens.shape)
    for column in range(tokens.shape[2]):
        row = _rows(scenarios, which, tokens, column)
        stays = ~redrawn[..., column] & scenarios.possible[scenario, row, tokens[..., column]]
        how = proposal[..., column]
        steps = scenarios.cumulative[np.minimum(how, BEST - 1), scenario, row]
        drawn = (uniform[..., column, None] >= steps[..., :-1]).sum(axis=-1)
        place = (np.maximum(how - BEST, 0), scenario, np.arange(tokens.shape[1]), column, _before(tokens, column))
        chosen = scenarios.chosen[place]
        drawn = np.where(how >= BEST, chosen, drawn)
        drawn = np.where(stays, tokens[..., column], drawn)
        tokens[..., column] = np.where(column < scenarios.num_drafts[which], drawn, 0)
    return tokens


def possible_blocks(scenarios: Scenarios, which: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Which blocks of tokens int [N, B, K] have positive probability, bool [N]."""
    fine = np.ones(len(tokens), bool)
    for column in range(tokens.shape[2]):
        row = _rows(scenarios, which, tokens, column)
        possible = scenarios.possible[which[:, None], row, tokens[..., column]]
        fine &= (possible | (column >= scenarios.num_drafts[which])).all(axis=1)
    return fine


def policy_inputs(scenarios: Scenarios, which: np.ndarray, tokens: np.ndarray) -> PolicyInputs:
    """What the policy is shown, `PolicyInputs` of NumPy arrays [N, ...] without survival.

    As in `specav.decode`, slots beyond num_drafts show no token (-1), but rows that a drafter may have computed there:
    the first one still follows from the last draft. Nothing random is drawn there, for it would decide nothing else.

    Args:
      which: int [N], the scenario of each block.
      tokens: int [N, B, K].
    """
    width = tokens.shape[2]
    row = np.stack([_rows(scenarios, which, tokens, column) for column in range(width)], axis=2)
    scenario = which[:, None, None]
    num_drafts = scenarios.num_drafts[which]
    features: dict[str, Any] = {name: table[scenario, row, tokens] for name, table in scenarios.features.items()}
    shown: dict[str, Any] = {
        name: getattr(scenarios, name)[which]
        for name in ("active", "num_base_tokens", "num_sampling", "num_drafting", "last_accepted", "last_tested")
    }
    shown["num_drafts"] = num_drafts
    shown["draft_tokens"] = np.where(np.arange(width) < num_drafts[..., None], tokens, -1).astype(np.int32)
    shown["acceptance"] = scenarios.acceptance[scenario, np.arange(width), row, tokens]
    return PolicyInputs(features=DraftFeatures(**features), **shown)


def _rows(scenarios, which, tokens, column):
    """The law of one slot of every request, by its place in the pool, int [N, B]."""
    return scenarios.row_of[which[:, None], np.arange(tokens.shape[1]), column, _before(tokens, column)]


def _before(tokens, column):
    """The draft before a slot, 0 for the first one, int [N, B]."""
    return tokens[..., column - 1] if column else np.zeros(tokens.shape[:2], tokens.dtype)


def _random_logits(rng, count, vocabulary):
    """Raw logits [S, L, V]; half of the rows aim at a log-odds of the maximum, so that thresholds lie among them."""
    shape = (count, _ROWS, 1)
    # A scenario has laws of all kinds, or of one kind: then long blocks are alike, and often verified far.
    one_kind = rng.random((count, 1, 1)) < 0.4
    spread = np.exp(np.where(one_kind, rng.uniform(-1, 2, (count, 1, 1)), rng.uniform(-3, 2.5, shape)))
    z = rng.normal(size=(count, _ROWS, vocabulary)) * spread
    aim = np.where(one_kind, rng.uniform(-1, 5, (count, 1, 1)) + rng.normal(size=shape), rng.uniform(-2, 6, shape))
    favourite = np.arange(vocabulary) == rng.integers(0, vocabulary, shape)
    rest = np.log(np.sum(np.where(favourite, 0.0, np.exp(z)), axis=-1, keepdims=True))
    z = np.where((rng.random(shape) < 0.5) & favourite, aim + rest, z)
    z = np.where(rng.random(shape) < 0.2, np.round(z), z)  # ties
    masked = (rng.random(shape) < 0.1) & (rng.random(z.shape) < 0.5) & ~favourite
    one_hot = (rng.random(shape) < 0.02) & ~favourite
    return np.where(masked | one_hot, -np.inf, z)


def _feature_tables(logits):
    """Every feature by (row, token), float32 [S, L, V]."""
    vocabulary = logits.shape[-1]
    every = np.broadcast_to(np.arange(vocabulary, dtype=np.int32), logits.shape).reshape(-1)
    repeated = np.repeat(logits.reshape(-1, vocabulary), vocabulary, axis=0)
    found = draft_features(jnp.asarray(repeated), jnp.asarray(every), names=tuple(FEATURES))
    tables = {name: np.asarray(getattr(found, name)).reshape(logits.shape) for name in FEATURES}
    # Equal rows must give equal bits: one value per law where the token does not matter.
    prefix = {name for name, spec in FEATURES.items() if spec.depends_on == "prefix"}
    return {
        name: np.broadcast_to(table[..., :1], table.shape) if name in prefix else table
        for name, table in tables.items()
    }


def _random_acceptance(rng, features, depends_on, width):
    """Predictions by (position, row, token), float32 [S, K, L, V]: logistic in the features, some raw, some coarse."""
    count = next(iter(features.values())).shape[0]
    signs = {"logit_q_max": 1.0, "entropy": -2.0, "margin": 0.5, "log_collision": 1.0}
    if depends_on == "draw":
        signs["logit_q_sampled"] = 1.0
    one = (count, 1, 1)
    raw = rng.random((count, 1, 1, 1)) < 0.25  # the default of `specav.decode`: acceptance = max q
    score = np.zeros(features["entropy"].shape)
    for name, sign in signs.items():
        # A prediction of class "draw" that ignores the draw would test nothing.
        weight = sign * rng.uniform(0.1, 1.2, one) * (rng.random(one) < (1.0 if name == "logit_q_sampled" else 0.6))
        score = score + weight * features[name]
    score = (
        score[:, None]
        + rng.uniform(-2, 3, (count, 1, 1, 1))
        + rng.choice([0.3, 1.5], (count, 1, 1, 1)) * rng.normal(size=(count, width, 1, 1))
    )
    certain = features["logit_q_sampled" if depends_on == "draw" else "logit_q_max"][:, None]
    predicted = 1 / (1 + np.exp(-np.clip(np.where(raw, certain, score), -60, 60)))
    coarse = rng.random((count, 1, 1, 1)) < 0.2
    return np.where(coarse, np.round(4 * predicted) / 4, predicted).astype(np.float32)


def _random_lengths(rng, count, batch, width):
    """num_drafts int32 [S, B] and active bool [S, B]; some batches nearly empty, where one request decides alone."""
    few = rng.choice([1, 2, 3, max(batch // 4, 1), *4 * [batch]], size=(count, 1))
    place = np.argsort(rng.random((count, batch)), axis=1)
    with_drafts = place < few
    # Requests without drafts have ended, or have nothing to draft and still count in the step.
    active = with_drafts | (rng.random((count, batch)) < rng.choice([0.0, 0.3, 1.0], size=(count, 1)))
    ragged = rng.random((count, 1)) < 0.5
    lengths = np.where(ragged, rng.integers(1, width + 1, (count, batch)), width)
    return np.where(with_drafts, lengths, 0).astype(np.int32), active


def _proposals(laws):
    """Distribution functions [4, S, L, V]; 1.0 exactly from the last possible token on."""
    possible = laws > 0
    most = np.arange(laws.shape[-1]) == np.argmax(laws, axis=-1)[..., None]
    least = np.arange(laws.shape[-1]) == np.argmin(np.where(possible, laws, np.inf), axis=-1)[..., None]
    steps = np.cumsum(np.stack([laws, possible, most, least]).astype(np.float64), axis=-1)
    return steps / steps[..., -1:]


def _best_and_worst(row_of, acceptance, possible):
    """Tokens with the largest and the smallest survival summed over the rest of the block, int [2, S, B, K, V].

    Backwards from the last slot: prospects of a token are a (1 + prospects of what follows it).
    """
    scenario, width = np.arange(len(row_of))[:, None, None], row_of.shape[2]
    chosen = np.empty((2, *row_of.shape), np.int64)
    for which, sign in enumerate((1.0, -1.0)):
        following = np.zeros((*row_of.shape[:2], row_of.shape[3]))  # [S, B, V]
        for column in reversed(range(width)):
            row = row_of[:, :, column]  # [S, B, V], by the draft before
            prospects = acceptance[scenario, column, row] * (1 + following[:, :, None, :])  # [S, B, V, V]
            score = np.where(possible[scenario, row], sign * prospects, -np.inf)
            chosen[which, :, :, column] = score.argmax(axis=-1)
            following = sign * score.max(axis=-1)
    return chosen
