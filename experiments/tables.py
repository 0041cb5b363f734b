"""The main job: AUC, log-loss and calibration of every feature, on drafts of the shipped pair.

    python -m experiments.tables --out build/tables

1. decodes held-out text with K = 7 at temperature 1, verifying everything (`experiments.collect`);
2. replays the drafts prequentially: predict, then learn (`experiments.replay`);
3. writes tables.json, tables.md and figures.

Main rows count *observed* slots: tested, with every earlier draft of the block accepted. Those are the labels a decoder
sees. The all-slots view scores every slot that has a target row against its exact acceptance probability a: another
population, of drafts that would often never be reached.
"""

import argparse
import json
import platform
import shlex
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float
from tqdm import tqdm

from experiments import figures
from experiments.collect import DraftedRounds, Settings, collect
from experiments.replay import prequential
from specav import estimators, metrics
from specav.features import FEATURES, feature_class

BINS = 15  # of equal width, for ECE and the reliability diagram
COLUMNS = ("auc", "log_loss", "ece", "mean_prediction", "acceptance")


class Predictions(NamedTuple):
    """Predictions of one table row.

    Attributes:
      name: the row's name.
      kind: "prefix", "draw" or "ceiling": what the prediction may look at. Rows of different kinds do not compete.
      values: float32 [R, B, K].
    """

    name: str
    kind: str
    values: Float[np.ndarray, "R B K"]


def main(arguments: list[str] | None = None) -> None:
    """Entry point."""
    options = _parser().parse_args(arguments)
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    settings = Settings(num_batches=options.batches, rounds=options.rounds, batch=options.batch, seed=options.seed)
    rounds = collect(settings, out.parent / "drafts", options.data)
    decoded = time.monotonic()
    predictions = predict_all(rounds, settings.num_draft_tokens)
    tables = {"meta": {}, "rows": score(predictions, rounds), "all_slots": score_all_slots(predictions, rounds)}
    drawn = figures.draw(out, tables["rows"], predictions, rounds, BINS)
    meta = {
        "command": shlex.join(["python", "-m", "experiments.tables", *(arguments or sys.argv[1:])]),
        "settings": settings._asdict(),
        "rounds": int(rounds.valid.shape[0]),
        "slots": int(rounds.valid.sum()),
        "observed": int(rounds.labels.observed.sum()),
        "bins": BINS,
        "probability_clip": metrics.PROBABILITY_CLIP,
        "figures": drawn,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
    }
    tables["meta"] = meta
    (out / "tables.json").write_text(json.dumps(tables, indent=1) + "\n")
    (out / "tables.md").write_text(markdown(tables))
    print(f"decoding {decoded - began:.0f} s, replay and tables {time.monotonic() - decoded:.0f} s")
    print(f"{meta['slots']} slots, {meta['observed']} observed; tables and figures in {out}/")
    print(_table([row for row in tables["rows"] if row["position"] == "all"]))


def predict_all(rounds: DraftedRounds, width: int) -> list[Predictions]:
    """Predictions of every row of the tables.

    Args:
      rounds: labelled drafts.
      width: K.
    """
    online = estimators.online_logistic
    makers = {"vllm_online": estimators.vllm_online(width)}
    for name in FEATURES:
        makers[f"online {name}"] = online(width, (name,))
    makers["online all five"] = online(width, tuple(FEATURES))
    raw = 1 / (1 + np.exp(-np.asarray(rounds.features.logit_q_max, np.float64)))
    result = [Predictions("raw q_max", "prefix", raw.astype(np.float32))]
    for name, estimator in tqdm(makers.items(), desc="replay", unit="estimator"):
        result.append(Predictions(name, feature_class(estimator.features), prequential(estimator, rounds)))
    result.append(Predictions("ceiling alpha", "ceiling", np.asarray(rounds.prefix_acceptance)))
    result.append(Predictions("ceiling a", "ceiling", np.asarray(rounds.token_acceptance)))
    return result


def score(predictions: list[Predictions], rounds: DraftedRounds) -> list[dict[str, Any]]:
    """Main rows: observed slots, verdicts as labels; overall and per position (1-based)."""
    labels = rounds.labels.accepted.astype(np.float32)
    return [
        _row(item, position, labels, mask)
        for item in tqdm(predictions, desc="scoring", unit="row")
        for position, mask in _positions(rounds.labels.observed)
    ]


def score_all_slots(predictions: list[Predictions], rounds: DraftedRounds) -> list[dict[str, Any]]:
    """All slots with a target row, the exact acceptance probability a as a soft label."""
    return [_row(item, "all", rounds.token_acceptance, rounds.valid) for item in predictions]


def markdown(tables: dict[str, Any]) -> str:
    """The tables as text, with what they mean."""
    meta, rows = tables["meta"], tables["rows"]
    width = meta["settings"]["num_draft_tokens"]
    parts = [
        "# Acceptance tables",
        f"Made by `{meta['command']}` (jax {meta['jax']}, {meta['device']}): {meta['rounds']} rounds, "
        f"{meta['slots']} draft slots with a target row, {meta['observed']} observed. K = {width}, temperature "
        f"{meta['settings']['temperature']}. Prequential: every prediction was made before its label was learned.",
        "Class: *prefix* rows may not look at the drawn token, *draw* rows may (lossless under the coupled and "
        "deferred rules), *ceiling* rows know the target: no prefix row beats alpha, no draw row beats a, in log-loss "
        f"or AUC. ECE: {meta['bins']} bins of equal width; a perfect predictor's is not 0 in a finite sample.",
        "## Observed slots, all positions",
        _table([row for row in rows if row["position"] == "all"]),
        "![reliability](reliability.png)",
    ]
    for metric, title in (("auc", "AUC"), ("log_loss", "Log-loss"), ("ece", "ECE")):
        parts += [f"## {title} by position", _by_position(rows, metric, width)]
    parts += [
        "![AUC by position](auc.png)",
        "![survival by position](survival.png)",
        "## All slots (another population)",
        "Every slot with a target row, reached or not, against its exact acceptance probability a (soft labels).",
        _table(tables["all_slots"]),
    ]
    return "\n\n".join(parts) + "\n"


def _positions(mask):
    """("all", mask) and (i, mask of position i), positions counted from 1."""
    yield "all", mask
    for index in range(mask.shape[-1]):
        only = np.zeros_like(mask)
        only[..., index] = mask[..., index]
        yield index + 1, only


def _row(item, position, labels, mask):
    """One table row; the mask is a weight, so that every row has one shape and compiles once."""
    measured = _measure(item.values, labels, mask.astype(np.float32))
    return {
        "estimator": item.name,
        "class": item.kind,
        "position": position,
        "n": int(mask.sum()),
        **{name: float(value) for name, value in measured.items()},
        "mean_prediction": float(np.mean(item.values[mask], dtype=np.float64)),
        "acceptance": float(np.mean(labels[mask], dtype=np.float64)),
    }


@jax.jit
def _measure(probabilities, labels, weights):
    return {
        "auc": metrics.auc(probabilities, labels, weights=weights),
        "log_loss": metrics.log_loss(probabilities, labels, weights=weights),
        "ece": metrics.expected_calibration_error(probabilities, labels, weights=weights, bins=BINS),
    }


def _table(rows):
    lines = [
        "| estimator | class | n | AUC | log-loss | ECE | mean prediction | acceptance |",
        "|---|---|" + "---:|" * 6,
    ]
    for row in rows:
        numbers = " | ".join(f"{row[column]:.4f}" for column in COLUMNS)
        lines.append(f"| {row['estimator']} | {row['class']} | {row['n']} | {numbers} |")
    return "\n".join(lines)


def _by_position(rows, metric, width):
    head = " | ".join(str(position) for position in range(1, width + 1))
    lines = [f"| estimator | class | {head} |", "|---|---|" + "---:|" * width]
    names = dict.fromkeys((row["estimator"], row["class"]) for row in rows)
    value = {(row["estimator"], row["position"]): row[metric] for row in rows}
    for name, kind in names:
        numbers = " | ".join(f"{value[name, position]:.4f}" for position in range(1, width + 1))
        lines.append(f"| {name} | {kind} | {numbers} |")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    defaults = Settings()
    parser = argparse.ArgumentParser(prog="python -m experiments.tables", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", default="build/tables", help="folder for tables and figures (default: %(default)s)")
    parser.add_argument("--data", type=Path, default=None, help="folder of further texts, see experiments/corpus.py")
    parser.add_argument("--batch", type=int, default=defaults.batch, help="requests side by side")
    parser.add_argument("--batches", type=int, default=defaults.num_batches, help="batches of prompts")
    parser.add_argument("--rounds", type=int, default=defaults.rounds, help="rounds per batch")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    return parser


if __name__ == "__main__":
    main()
