"""How soon the monitor sees a leak in the shipped models: `python -m experiments.monitor_power`.

The leak is the threshold on the drawn token's own probability, under the standard rule, set so that half the drafts are
discarded. Each seed is a decoder of its own, watched from its first token. The same policy under the coupled rule is
exact: whatever the monitor raises there is a false alarm. Beside stands what there is to see: the total variation
between the law of the next token and the target's, averaged over the contexts that were decoded. It is not estimated
from tokens but computed from p and q in each context (the first position of each round).

Prints a table and writes it with the command to build/monitor_power.json. Nearly all of the time goes into the exact
decoders, which use up their tokens; `--exact-tokens 2000` is quick.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from tqdm import tqdm

from experiments import corpus
from experiments.models import CHECKPOINTS, Model, load_pair
from specav import policies
from specav.decode import decoder
from specav.drafting import autoregressive_drafter
from specav.lossless.monitor import LosslessMonitor, MonitorState, discarding_law, lossless_monitor, round_evidence
from specav.policies import Policy

PROMPT = 32


class Settings(NamedTuple):
    """What is decoded.

    Attributes:
      num_draft_tokens: K.
      seeds: decoders, each with its own monitor, side by side.
      requests: of each decoder.
      rounds: of a segment; then every request gets a new prompt.
      budget: emitted tokens per seed at most.
      level: of the monitor.
      seed: of prompts and noise.
    """

    num_draft_tokens: int = 4
    seeds: int = 50
    requests: int = 2
    rounds: int = 48
    budget: int = 20_000
    level: float = 0.01
    seed: int = 0


class Pair(NamedTuple):
    """The shipped models and prompts int32 [N, PROMPT] of held-out text."""

    target: Model
    draft: Model
    prompts: Int[np.ndarray, "N P"]


class Tally(NamedTuple):
    """What is carried along.

    Attributes:
      monitors: MonitorState [S, ...].
      emitted: int32 [S], tokens.
      detected: int32 [S], tokens emitted when the alarm was raised; -1 before.
      distance, contexts: float32 [], total variation at the first position, summed, and how many contexts.
      verified, drafted: float32 [], drafts.
    """

    monitors: MonitorState
    emitted: Int[Array, " S"]
    detected: Int[Array, " S"]
    distance: Float[Array, ""]
    contexts: Float[Array, ""]
    verified: Float[Array, ""]
    drafted: Float[Array, ""]


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """The command line; returns what it writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Settings()
    parser.add_argument("--seeds", type=int, default=default.seeds)
    parser.add_argument("--tokens", type=int, default=default.budget, help="emitted tokens per seed at most")
    parser.add_argument("--exact-tokens", type=int, help="the same for the exact decoders; default as --tokens")
    parser.add_argument("--level", type=float, default=default.level)
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--out", type=Path, default=Path("build/monitor_power.json"))
    args = parser.parse_args(arguments)
    settings = Settings(seeds=args.seeds, budget=args.tokens, level=args.level, seed=args.seed)
    exact = settings._replace(budget=args.exact_tokens or args.tokens)

    pair = load()
    threshold = half_threshold(pair, settings)
    policy = policies.threshold("logit_q_sampled", threshold)
    rows = {
        "standard rule (leaks)": summary(watch(pair, settings, policy, "standard", threshold), settings),
        "coupled rule (exact)": summary(watch(pair, exact, policy, "coupled", None), exact),
    }
    command = " ".join(["python -m experiments.monitor_power", *(sys.argv[1:] if arguments is None else arguments)])
    report = {"command": command, "settings": settings._asdict(), "policy": policy.name, "rows": rows}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=2) + "\n")
    print(f"{policy.name}, K = {settings.num_draft_tokens}, level {settings.level}, {settings.seeds} seeds")
    for name, row in rows.items():
        print(f"\n{name}")
        for key, value in row.items():
            print(f"  {key:34} {value}")
    return report


def load(num_prompts: int = 400, checkpoints: Path = CHECKPOINTS) -> Pair:
    """The shipped models, and as many prompts from each workload that is packaged."""
    target, draft, tokenizer = load_pair(checkpoints)
    prompts = [corpus.held_out_prompts(tokenizer, name, num_prompts, PROMPT) for name in corpus.PACKAGED]
    return Pair(target, draft, np.concatenate(prompts))


def half_threshold(pair: Pair, settings: Settings) -> float:
    """Log-odds at which `policies.threshold("logit_q_sampled", .)` discards half of the drafts.

    A draft is verified if its log-odds and those of all before it are large enough: the median of running minima, on
    drafts of one segment in which everything is verified.
    """
    start, step = _loop(pair, settings, policies.everything(), "coupled")

    @jax.jit
    def collect(keys, prompts):
        def one(state, _):
            state, info = step(state)
            return state, jax.lax.cummin(info.features.logit_q_sampled, axis=1)  # pyright: ignore

        return jax.lax.scan(one, start(keys, prompts), length=settings.rounds)[1]

    rng = np.random.default_rng(settings.seed)
    return round(float(np.median(collect(_keys(settings, 0), _draw_prompts(rng, pair, settings)))), 4)


def watch(pair: Pair, settings: Settings, policy: Policy, rule: str, leak_below: float | None) -> Tally:
    """Decodes with a monitor for each seed, until all have raised the alarm or used up their tokens.

    Args:
      pair: models and prompts.
      settings: see `Settings`.
      policy, rule: what decodes; not refused if it leaks.
      leak_below: log-odds below which a first draft is discarded, for the true total variation; None: it never is.
    """
    monitor = lossless_monitor(settings.level)
    start, step = _loop(pair, settings, policy, rule)

    @jax.jit
    def segment(tally, keys, prompts):
        def one(carry, _):
            state, tally = carry
            state, info = step(state)
            return (state, _count(tally, info, monitor, settings, leak_below)), None

        return jax.lax.scan(one, (start(keys, prompts), tally), length=settings.rounds)[0][1]

    rng = np.random.default_rng(settings.seed)
    zero, zeros = jnp.zeros(()), jnp.zeros((settings.seeds,), jnp.int32)
    monitors = jax.tree.map(lambda x: jnp.broadcast_to(x, (settings.seeds, *x.shape)), monitor.init())
    tally, index = Tally(monitors, zeros, zeros - 1, zero, zero, zero, zero), 0
    with tqdm(total=settings.budget, desc=f"{rule} rule", unit="token") as bar:
        while True:
            index += 1
            tally = segment(tally, _keys(settings, index), _draw_prompts(rng, pair, settings))
            emitted = int(tally.emitted.min())
            bar.update(min(emitted, settings.budget) - bar.n)
            bar.set_postfix(alarms=int((tally.detected >= 0).sum()))
            if emitted >= settings.budget or bool((tally.detected >= 0).all()):
                return tally


def summary(tally: Tally, settings: Settings) -> dict[str, Any]:
    """What the table shows. Alarms beyond the budget do not count."""
    detected = np.asarray(tally.detected)
    times = np.sort(detected[(detected >= 0) & (detected <= settings.budget)])
    row: dict[str, Any] = {
        "alarms": f"{len(times)} of {settings.seeds}",
        "alarm rate": len(times) / settings.seeds,
        "token budget per seed": settings.budget,
        "true total variation, position 1": float(f"{float(tally.distance / tally.contexts):.4g}"),
        "share of drafts discarded": round(1 - float(tally.verified / tally.drafted), 4),
    }
    if len(times):
        for level in (0.1, 0.5, 0.9, 1.0):
            row[f"tokens to alarm, quantile {level}"] = int(np.quantile(times, level, method="higher"))
    return row


def _loop(pair, settings, policy, rule):
    """(start(keys, prompts) -> state, step) of a decoder for all requests of all seeds."""
    room = settings.rounds * (settings.num_draft_tokens + 1) + 1
    loop = decoder(
        pair.target.apply,
        autoregressive_drafter(pair.draft.apply, settings.num_draft_tokens),
        num_draft_tokens=settings.num_draft_tokens,
        max_new_tokens=room,
        policy=policy,
        rule=rule,
        feature_names=("logit_q_sampled",),
        require_lossless=False,
    )

    def start(keys, prompts):
        batch, length = prompts.shape
        caches = pair.target.init_cache(batch, length + room), pair.draft.init_cache(batch, length + room)
        return loop.init(keys, prompts, jnp.full((batch,), length, jnp.int32), *caches)

    return start, loop.step


def _count(tally: Tally, info, monitor: LosslessMonitor, settings: Settings, leak_below) -> Tally:
    """One round: feeds every seed's monitor with its own requests, and counts."""

    def by_seed(x):
        return x.reshape(settings.seeds, settings.requests, *x.shape[1:])

    target, draft, tokens, mask = round_evidence(info)
    monitors = jax.vmap(monitor.update)(tally.monitors, *map(by_seed, (target, draft, tokens, mask)))
    emitted = tally.emitted + jnp.sum(by_seed(info.num_committed), axis=1)
    p, q = target[:, 0], draft[:, 0]
    cut = 0.0 if leak_below is None else 1 / (1 + np.exp(-leak_below))
    bent = discarding_law(p, q, (q < cut).astype(jnp.float32))
    return Tally(
        monitors=monitors,
        emitted=emitted,
        detected=jnp.where((tally.detected < 0) & monitors.alarm, emitted, tally.detected),
        distance=tally.distance + 0.5 * jnp.sum(jnp.abs(bent - p)),
        contexts=tally.contexts + len(p),
        verified=tally.verified + jnp.sum(info.num_verified, dtype=jnp.float32),
        drafted=tally.drafted + jnp.sum(info.block.num_drafts, dtype=jnp.float32),
    )


def _keys(settings, index):
    """Keys of all requests of the index-th segment."""
    return jax.random.split(
        jax.random.fold_in(jax.random.key(settings.seed), index), settings.seeds * settings.requests
    )


def _draw_prompts(rng, pair, settings):
    """A prompt for every request, with replacement."""
    return jnp.asarray(pair.prompts[rng.integers(len(pair.prompts), size=settings.seeds * settings.requests)])


if __name__ == "__main__":
    main()
