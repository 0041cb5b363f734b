"""Labelled drafts of the shipped pair: decodes held-out text and records every draft slot.

Everything is verified, so that each slot has a target row; hence the verdicts, the labels they censor, and the exact
acceptance probabilities. Decoding runs on the device, a chunk of rounds at a time, for a progress bar. Each batch of
prompts is one file in the work folder; a run that was interrupted continues with the next batch.
"""

import hashlib
import json
import os
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from tqdm import tqdm

from experiments import corpus
from experiments.models import CHECKPOINTS, load_pair
from specav.decode import decoder
from specav.drafting import autoregressive_drafter
from specav.features import FEATURES, DraftFeatures
from specav.labels import Labels
from specav.sampling import SamplingParams


class Settings(NamedTuple):
    """What is decoded.

    Attributes:
      num_draft_tokens: K.
      batch: requests decoded side by side.
      num_batches: batches of prompts, taken from the workloads in turn.
      rounds: rounds per batch.
      prompt_length: tokens of each prompt.
      workloads: names of `experiments.corpus`.
      temperature: of both models.
      seed: of prompts and noise.
    """

    num_draft_tokens: int = 7
    batch: int = 32
    num_batches: int = 18
    rounds: int = 50
    prompt_length: int = 48
    workloads: tuple[str, ...] = ("code", "prose")
    temperature: float = 1.0
    seed: int = 0


class DraftedRounds(NamedTuple):
    """Labelled drafts in the order they were made: R rounds of B requests with K drafts.

    Attributes:
      features: DraftFeatures, float32 [R, B, K].
      token_acceptance: float32 [R, B, K], a_i = min(1, p(x)/q(x)), exact.
      prefix_acceptance: float32 [R, B, K], alpha_i = 1 - TV(p, q), exact.
      labels: Labels, bool [R, B, K].
      valid: bool [R, B, K], slots that hold a draft with a target row.
      request: int32 [R, B], a number for every request.
    """

    features: DraftFeatures
    token_acceptance: Float[Array, "R B K"]
    prefix_acceptance: Float[Array, "R B K"]
    labels: Labels
    valid: Bool[Array, "R B K"]
    request: Int[Array, "R B"]


def collect(settings: Settings, work: Path, data: Path | None = None, checkpoints: Path = CHECKPOINTS) -> DraftedRounds:
    """Decodes all batches, or loads those that an earlier run with the same settings and models has finished.

    Args:
      settings: what to decode.
      work: folder for one file per batch.
      data: folder of further texts, for workloads that need it.
      checkpoints: folder of the pair.

    Returns:
      All batches, one after the other.
    """
    target, draft, tokenizer = load_pair(checkpoints)
    digest = _digest(settings, data, checkpoints)
    folder = work / f"drafts-{digest}"
    folder.mkdir(parents=True, exist_ok=True)
    room = settings.rounds * (settings.num_draft_tokens + 1) + 1
    length = settings.prompt_length + room
    sampling = SamplingParams(settings.temperature)
    loop = decoder(
        target.apply,
        autoregressive_drafter(draft.apply, settings.num_draft_tokens),
        num_draft_tokens=settings.num_draft_tokens,
        max_new_tokens=room,
        sampling=sampling,
        feature_names=tuple(FEATURES),
    )
    chunk = next(size for size in (10, 5, 4, 3, 2, 1) if settings.rounds % size == 0)

    @jax.jit
    def start(key, prompts):
        batch = prompts.shape[0]
        lengths = jnp.full((batch,), prompts.shape[1], jnp.int32)
        caches = target.init_cache(batch, length), draft.init_cache(batch, length)
        return loop.init(key, prompts, lengths, *caches)

    @jax.jit
    def advance(state):
        def one(state, _):
            state, info = loop.step(state)
            columns = jnp.arange(settings.num_draft_tokens, dtype=jnp.int32)[None, :]
            valid = columns < info.block.num_drafts[:, None]
            true = info.true_acceptance
            return state, (info.features, true.token, true.prefix, info.labels, valid)

        return jax.lax.scan(one, state, length=chunk)

    prompts = {name: _prompts(settings, name, tokenizer, data) for name in settings.workloads}
    parts = []
    with tqdm(total=settings.num_batches * settings.rounds, desc="decoding", unit="round") as bar:
        for index in range(settings.num_batches):
            path = folder / f"batch-{index:03d}.npz"
            part = _load(path)
            if part is None:
                turn, workload = divmod(index, len(settings.workloads))
                rows = prompts[settings.workloads[workload]][turn * settings.batch : (turn + 1) * settings.batch]
                keys = jax.random.split(jax.random.key(settings.seed * 1000 + index), settings.batch)
                state, pieces = start(keys, jnp.asarray(rows)), []
                for _ in range(settings.rounds // chunk):
                    state, piece = advance(state)
                    pieces.append(jax.tree.map(np.asarray, piece))
                    bar.update(chunk)
                joined: Any = jax.tree.map(lambda *leaves: np.concatenate(leaves), *pieces)
                request = index * settings.batch + np.arange(settings.batch, dtype=np.int32)
                request = np.broadcast_to(request, (settings.rounds, settings.batch))
                part = DraftedRounds(*joined, request=request)  # pyright: ignore
                _save(path, part)
            else:
                bar.update(settings.rounds)
            parts.append(part)
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


def _prompts(settings, workload, tokenizer, data):
    """Enough prompts of one workload for all its batches."""
    turns = -(-settings.num_batches // len(settings.workloads))
    return corpus.held_out_prompts(
        tokenizer, workload, turns * settings.batch, settings.prompt_length, seed=settings.seed, data=data
    )


def _digest(settings, data, checkpoints):
    """Names everything that the drafts depend on, so that parts of another run are never mixed in."""
    digest = hashlib.sha256(json.dumps([settings._asdict(), str(data), jax.__version__], sort_keys=True).encode())
    for path in sorted(Path(checkpoints).iterdir()):
        digest.update(path.read_bytes())
    for document in corpus.documents(True, data):
        digest.update(document.text.encode())
    return digest.hexdigest()[:16]


def _save(path: Path, part: DraftedRounds) -> None:
    """Writes one batch; the file appears whole or not at all."""
    leaves = {f"leaf{i:02d}": leaf for i, leaf in enumerate(jax.tree.leaves(part))}
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        np.savez(file, **leaves)
    os.replace(partial, path)


def _load(path: Path) -> DraftedRounds | None:
    """Reads one batch; None if there is none (a file that cannot be read is made again)."""
    if not path.exists():
        return None
    zero: Any = np.zeros(0)
    empty = DraftedRounds(DraftFeatures(*[zero] * 5), zero, zero, Labels(zero, zero), zero, zero)
    try:
        with np.load(path) as file:
            leaves: list[Any] = [file[name] for name in sorted(file.files)]
        return jax.tree.unflatten(jax.tree.structure(empty), leaves)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        return None
