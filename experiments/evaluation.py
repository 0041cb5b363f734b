"""How good the shipped models are on held-out text: `python -m experiments.evaluation [--data DIR]`.

Prints, and returns as numbers: the loss of both models in nats per token, alpha = E[sum_x min(p, q)] at temperature 1
(the acceptance at position 1), and samples of the target.
"""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float, Int32

from experiments import corpus, models
from experiments.tokenizer import Tokenizer


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m experiments.evaluation", description=str(__doc__).split("\n")[0])
    parser.add_argument("--data", type=Path, help="folder with more text (see experiments/corpus.py)")
    parser.add_argument("--out", type=Path, default=models.CHECKPOINTS, help="folder of the models")
    parser.add_argument("--windows", type=int, default=96, help="windows of 160 tokens per workload")
    parser.add_argument("--samples", type=int, default=1, help="samples per workload and temperature")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts and the samples")
    args = parser.parse_args(arguments)
    print(json.dumps(evaluate(args.out, args.data, args.windows), indent=2))
    target, _, tokenizer = models.load_pair(args.out)
    for workload in corpus.PACKAGED if args.samples else ():
        prompts = corpus.held_out_prompts(tokenizer, workload, args.samples, 32, seed=args.seed)
        for temperature in (1.0, 0.7):
            for row in continuations(target, prompts, 160, temperature, args.seed):
                heading = f"{workload}, temperature {temperature}; the prompt ends at >>>"
                prompt, rest = tokenizer.decode(row[:32]), tokenizer.decode(row[32:])
                print(f"\n---- {heading}\n{prompt}>>>{rest}")


def evaluate(folder: Path, data: Path | None = None, num_windows: int = 96) -> dict[str, Any]:
    """Held-out loss of both models (nats per token) and alpha, by workload."""
    target, draft, tokenizer = models.load_pair(folder)
    report: dict[str, Any] = {}
    for workload, windows in held_out_windows(tokenizer, data, num_windows).items():
        report[workload] = {
            "tokens": int(windows[:, 1:].size),
            "target_loss": round(held_out_loss(target, windows), 4),
            "draft_loss": round(held_out_loss(draft, windows), 4),
            "alpha": round(float(acceptance(target, draft, windows).mean()), 4),
        }
    return report


def held_out_windows(
    tokenizer: Tokenizer, data: Path | None = None, num_windows: int = 96, length: int = 160
) -> dict[str, Int32[np.ndarray, "N T"]]:
    """Evenly spaced windows of the held-out text, for each workload that there is text for."""
    docs = corpus.documents(True, data)
    found = {}
    for workload in corpus.WORKLOADS:
        stream = corpus.token_stream(tokenizer, [doc for doc in docs if doc.workload == workload])
        count = min(num_windows, len(stream) // length)
        if count:
            starts = np.linspace(0, len(stream) - length, count).astype(int)
            found[workload] = stream[starts[:, None] + np.arange(length)].astype(np.int32)
    return found


def held_out_loss(model: models.Model, windows: Int32[np.ndarray, "N T"]) -> float:
    """Mean loss of every token after a window's first, nats."""
    rows = [_losses(model.config, model.params, chunk) for chunk in _chunks(windows)]
    return float(np.concatenate([np.asarray(row) for row in rows]).mean())


def acceptance(
    target: models.Model, draft: models.Model, windows: Int32[np.ndarray, "N T"]
) -> Float[np.ndarray, "N T"]:
    """alpha = sum_x min(p(x), q(x)) at temperature 1 after every token of the windows."""
    rows = [_acceptance(target.config, draft.config, target.params, draft.params, w) for w in _chunks(windows)]
    return np.concatenate([np.asarray(row) for row in rows])


def continuations(
    model: models.Model, prompts: Int32[np.ndarray, "B P"], num_tokens: int, temperature: float = 1.0, seed: int = 0
) -> Int32[np.ndarray, "B L"]:
    """Prompts, each followed by `num_tokens` drawn one at a time; temperature 0 takes the likeliest."""
    return np.asarray(_continue(model.config, num_tokens, temperature, model.params, jnp.asarray(prompts), seed))


@partial(jax.jit, static_argnums=(0, 1, 2))
def _continue(config, num_tokens, temperature, params, prompts, seed):
    model = models.make_model(config, params)
    batch, length = prompts.shape
    one = jnp.ones(batch, jnp.int32)
    state = model.init_cache(batch, length + num_tokens)
    # All but the last prompt token are prefilled; the loop feeds one token and draws the next.
    _, state = model.apply(state, prompts, 0 * one, (length - 1) * one)

    def step(carry, at):
        state, last = carry
        logits, state = model.apply(state, last[:, None], (length - 1 + at) * one, one)
        row = logits[:, 0]
        if temperature > 0:
            drawn = jax.random.categorical(jax.random.fold_in(jax.random.key(seed), at), row / temperature)
        else:
            drawn = jnp.argmax(row, axis=-1)
        drawn = drawn.astype(jnp.int32)
        return (state, drawn), drawn

    _, drawn = jax.lax.scan(step, (state, prompts[:, -1]), jnp.arange(num_tokens, dtype=jnp.int32))
    return jnp.concatenate([prompts, drawn.T], axis=1)


@partial(jax.jit, static_argnums=0)
def _losses(config, params, windows):
    logits = models.forward(config, params, windows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:])


@partial(jax.jit, static_argnums=(0, 1))
def _acceptance(target_config, draft_config, target_params, draft_params, windows):
    p = jax.nn.softmax(models.forward(target_config, target_params, windows), axis=-1)
    q = jax.nn.softmax(models.forward(draft_config, draft_params, windows), axis=-1)
    return jnp.minimum(p, q).sum(axis=-1)


def _chunks(windows: np.ndarray, size: int = 24) -> list[np.ndarray]:
    return [windows[i : i + size] for i in range(0, len(windows), size)]


if __name__ == "__main__":
    main()
