"""Training of the shipped models: `python -m experiments.train tokenizer|target|draft|all [--data DIR] [--steps N]`.

The target learns the next token of the training text. The draft learns the same at first, then the target's law
(cross-entropy to its probabilities, plus total variation, on the same text). AdamW, gradient clipping, warm-up, a
constant rate, and a cosine down to zero over the last part. Everything is a function of the seed and the step, so a
run that was interrupted goes on from its last checkpoint (under build/train) to bit for bit the result of an
uninterrupted one, and a run whose rate has not begun to fall may still be given another number of steps.
"""

import argparse
import hashlib
import json
import math
import os
import platform
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

from experiments import corpus, evaluation, models
from experiments.storage import load_tree, save_tree
from experiments.tokenizer import Tokenizer, load_tokenizer, train_tokenizer


class Recipe(NamedTuple):
    """How one model is trained.

    Attributes:
      config: the model's sizes.
      steps: number of updates.
      batch, length: sequences per update and tokens per sequence; `length` exceeds the attention window.
      peak_rate, warmup, decay: the learning rate rises over `warmup` steps and falls over the last `decay` share.
      weight_decay, clip: of AdamW (matrices only); largest global norm of a gradient.
      plain_steps: updates on the text itself; later ones on the target's law. None: all on the text.
      seed: of the parameters and of the order of the data.
    """

    config: models.Config
    steps: int
    batch: int
    length: int
    peak_rate: float
    warmup: int = 200
    decay: float = 0.4
    weight_decay: float = 0.1
    clip: float = 1.0
    plain_steps: int | None = None
    seed: int = 0


RECIPES = {
    "target": Recipe(models.TARGET, steps=2100, batch=24, length=160, peak_rate=2e-3),
    "draft": Recipe(models.DRAFT, steps=4500, batch=16, length=160, peak_rate=3e-3, plain_steps=1000, seed=1),
}


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    args = _parser().parse_args(arguments)
    try:
        if args.what in ("tokenizer", "all"):
            make_tokenizer(args.out, args.data)
        for name in ("target", "draft"):
            if args.what in (name, "all"):
                recipe = RECIPES[name]
                if args.steps is not None:
                    recipe = recipe._replace(steps=args.steps)
                train(name, recipe, args.out, args.work, args.data, args.save_every, fresh=args.fresh)
                export(name, args.out, args.work, args.data)
        if args.what == "export":
            for name in ("target", "draft"):
                if _resume_file(args.work, name).is_file():
                    export(name, args.out, args.work, args.data)
        if args.what in ("all", "export"):
            report = evaluation.evaluate(args.out, args.data)
            _write_json(args.out / "pair.json", report)
            print(json.dumps(report, indent=2))
    except (ValueError, FileNotFoundError) as error:
        sys.exit(f"error: {error}")


def make_tokenizer(out: Path, data: Path | None) -> Tokenizer:
    """Trains the tokenizer on the training text and writes it."""
    tokenizer = train_tokenizer([doc.text for doc in corpus.documents(False, data)])
    tokenizer.save(out / "tokenizer.json")
    print(f"tokenizer: {tokenizer.vocab_size} tokens")
    return tokenizer


def train(
    name: str,
    recipe: Recipe,
    out: Path,
    work: Path,
    data: Path | None = None,
    save_every: int = 250,
    *,
    fresh: bool = False,
    stream: np.ndarray | None = None,
) -> Any:
    """Trains one model from its last checkpoint, or from the start, and returns its parameters.

    Args:
      name: of the model and of its checkpoint.
      recipe: how.
      out: folder with tokenizer.json and, where the recipe asks for the target's law, target.npz.
      work: folder of the resumable checkpoints.
      data: folder with more text, see `experiments.corpus`.
      save_every: steps between checkpoints.
      fresh: start anew, whatever checkpoint there is.
      stream: the training tokens, instead of those of the corpus.

    Raises:
      ValueError: the checkpoint is damaged or was made with other settings.
      FileNotFoundError: no tokenizer, or no target to learn from.
    """
    if stream is None:
        stream = corpus.token_stream(load_tokenizer(out / "tokenizer.json"), corpus.documents(False, data))
    optimizer = _optimizer(recipe)
    params = models.init_params(recipe.config, recipe.seed)
    state = (params, optimizer.init(params))
    settings = _settings(recipe, stream, data)
    path = _resume_file(work, name)
    start, last_loss = 0, math.nan
    if path.is_file() and not fresh:
        state, start, last_loss = _restore(path, state, recipe, settings)
    plain_steps = recipe.steps if recipe.plain_steps is None else min(recipe.plain_steps, recipe.steps)
    teacher: Any = None
    with tqdm(total=recipe.steps, initial=start, desc=name, unit="step", mininterval=2.0) as bar:
        for step in range(start, recipe.steps):
            batch = jnp.asarray(_batch(stream, recipe, step))
            if step < plain_steps:
                state, loss = _plain_update(recipe, state, batch)
            else:
                teacher = teacher or models.load_model(out / "target.npz")
                state, loss = _distil_update(recipe, teacher.config, state, teacher.params, batch)
            bar.update()
            if (step + 1) % save_every == 0 or step + 1 == recipe.steps:
                last_loss = float(loss)
                bar.set_postfix(loss=f"{last_loss:.3f}")
                meta = {"step": step + 1, "steps": recipe.steps, "settings": settings, "loss": last_loss}
                save_tree(path, {"params": state[0], "optimizer": _numbered(state[1])}, meta)
    return state[0]


def export(name: str, out: Path, work: Path, data: Path | None = None) -> None:
    """Writes the last checkpoint's parameters in bfloat16 to `out`, and beside them what made them, as JSON."""
    tree, meta = load_tree(_resume_file(work, name))
    config = models.Config(**meta["settings"]["config"])
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), tree["params"])
    save_tree(out / f"{name}.npz", params, {"config": config._asdict(), "step": meta["step"]})
    path = out / f"{name}.npz"
    tokenizer = load_tokenizer(out / "tokenizer.json")
    model = models.load_model(path)
    report = {
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
        "bytes": path.stat().st_size,
        "step": meta["step"],
        "steps": meta["steps"],
        "tokens_seen": meta["step"] * meta["settings"]["batch"] * meta["settings"]["length"],
        **meta["settings"],
        "last_batch_loss": meta["loss"],
        "held_out_loss": {
            workload: round(evaluation.held_out_loss(model, windows), 4)
            for workload, windows in evaluation.held_out_windows(tokenizer, data).items()
        },
        "command": f"python -m experiments.train {name} --steps {meta['steps']}" + (f" --data {data}" if data else ""),
    }
    _write_json(out / f"{name}.json", report)
    print(f"{name}: step {meta['step']}, held-out loss {report['held_out_loss']}")


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def _plain_update(recipe, state, batch):
    def loss_of(params):
        logits = models.forward(recipe.config, params, batch[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    return _update(recipe, state, loss_of)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def _distil_update(recipe, teacher_config, state, teacher_params, batch):
    law = jax.nn.softmax(models.forward(teacher_config, teacher_params, batch[:, :-1]), axis=-1)

    def loss_of(params):
        logits = models.forward(recipe.config, params, batch[:, :-1])
        # One minus the total variation is the acceptance, which the cross-entropy improves only indirectly.
        variation = 0.5 * jnp.abs(jax.nn.softmax(logits, axis=-1) - law).sum(axis=-1)
        return (optax.softmax_cross_entropy(logits, law) + variation).mean()

    return _update(recipe, state, loss_of)


def _update(recipe, state, loss_of):
    params, optimizer_state = state
    loss, gradient = jax.value_and_grad(loss_of)(params)
    # The optimiser mixes integer counts and floats in its bias correction.
    with jax.numpy_dtype_promotion("standard"):
        updates, optimizer_state = _optimizer(recipe).update(gradient, optimizer_state, params)
        params = optax.apply_updates(params, updates)
    return (params, optimizer_state), loss


def _optimizer(recipe: Recipe) -> optax.GradientTransformation:
    start = round(recipe.steps * (1 - recipe.decay))

    def rate(step):
        step = jnp.asarray(step, jnp.float32)
        rise = jnp.minimum(1.0, (step + 1) / recipe.warmup)
        progress = jnp.clip((step - start) / max(1, recipe.steps - start), 0.0, 1.0)
        return recipe.peak_rate * rise * 0.5 * (1 + jnp.cos(jnp.pi * progress))

    matrices = lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params)  # noqa: E731
    return optax.chain(
        optax.clip_by_global_norm(recipe.clip),
        optax.adamw(rate, b1=0.9, b2=0.98, weight_decay=recipe.weight_decay, mask=matrices),
    )


def _batch(stream: np.ndarray, recipe: Recipe, step: int) -> np.ndarray:
    """The sequences of one update, a function of seed and step: int32 [batch, length + 1]."""
    starts = np.random.default_rng([recipe.seed, step]).integers(0, len(stream) - recipe.length, recipe.batch)
    return stream[starts[:, None] + np.arange(recipe.length + 1)].astype(np.int32)


def _settings(recipe: Recipe, stream: np.ndarray, data: Path | None) -> dict[str, Any]:
    """All that decides the result, apart from the number of steps."""
    settings = {**recipe._asdict(), "config": recipe.config._asdict()}
    del settings["steps"]
    settings["data"] = {
        "text": "standard library and pydoc_data.topics" + (" and a data folder" if data else ""),
        "python": platform.python_version(),
        "tokens": len(stream),
        "sha256": hashlib.sha256(np.ascontiguousarray(stream).tobytes()).hexdigest()[:16],
    }
    return settings


def _restore(path: Path, state: Any, recipe: Recipe, settings: dict[str, Any]) -> tuple[Any, int, float]:
    tree, meta = load_tree(path)
    try:
        stored, step, steps, loss = meta["settings"], meta["step"], meta["steps"], meta["loss"]
        leaves = [tree["optimizer"][f"{i:04d}"] for i in range(len(jax.tree.leaves(state[1])))]
    except KeyError as error:
        raise ValueError(f"{path}: not a training checkpoint (no {error})") from error
    differing = sorted(key for key in settings if stored.get(key) != settings[key])
    if differing:
        raise ValueError(f"{path}: made with another {', '.join(differing)}; --fresh starts anew")
    if steps != recipe.steps and step > (1 - recipe.decay) * min(steps, recipe.steps):
        raise ValueError(
            f"{path}: at step {step} of {steps} the learning rate is already falling, or would be in a run of "
            f"{recipe.steps}; --fresh starts anew"
        )
    optimizer_state = jax.tree.unflatten(jax.tree.structure(state[1]), leaves)
    return jax.tree.map(jnp.asarray, (tree["params"], optimizer_state)), step, loss


def _numbered(tree: Any) -> dict[str, Any]:
    return {f"{i:04d}": leaf for i, leaf in enumerate(jax.tree.leaves(tree))}


def _resume_file(work: Path, name: str) -> Path:
    return work / f"{name}.npz"


def _write_json(path: Path, value: Any) -> None:
    partial_path = path.with_name(path.name + ".partial")
    partial_path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    os.replace(partial_path, path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m experiments.train", description=str(__doc__).split("\n")[0])
    parser.add_argument(
        "what",
        choices=("tokenizer", "target", "draft", "all", "export"),
        help="'all' makes the three in order; 'export' writes the last checkpoints of runs that are under way",
    )
    parser.add_argument("--data", type=Path, help="folder with more text (see experiments/corpus.py)")
    parser.add_argument("--steps", type=int, help="number of updates, instead of the recipe's")
    parser.add_argument("--out", type=Path, default=models.CHECKPOINTS, help="folder of the shipped files")
    parser.add_argument("--work", type=Path, default=Path("build/train"), help="folder of the resumable checkpoints")
    parser.add_argument("--save-every", type=int, default=250, help="steps between checkpoints")
    parser.add_argument("--fresh", action="store_true", help="ignore existing checkpoints")
    return parser


if __name__ == "__main__":
    main()
