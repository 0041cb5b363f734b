"""Figures beside the tables: reliability diagram, AUC by position, survival by position."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from specav import metrics

_STYLES = {"prefix": "-", "draw": "--", "ceiling": ":"}


def draw(out: Path, rows: list[dict[str, Any]], predictions: list[Any], rounds: Any, bins: int) -> list[str]:
    """Writes reliability.png, auc.png and survival.png into `out`; returns their names.

    Args:
      out: folder.
      rows: main rows of the tables.
      predictions: `experiments.tables.Predictions`, [R, B, K] each.
      rounds: `experiments.collect.DraftedRounds`.
      bins: equal-width bins of the reliability diagram.
    """
    makers = {
        "reliability.png": lambda axes: _reliability(axes, predictions, rounds, bins),
        "auc.png": lambda axes: _auc(axes, rows),
        "survival.png": lambda axes: _survival(axes, predictions, rounds),
    }
    for name, make in makers.items():
        figure = Figure(figsize=(8, 5.5), layout="constrained")
        axes = figure.subplots()
        make(axes)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
        figure.savefig(out / name, dpi=120)
    return list(makers)


def _reliability(axes, predictions, rounds, bins):
    observed = rounds.labels.observed
    labels = rounds.labels.accepted[observed].astype(np.float32)
    axes.plot([0, 1], [0, 1], color="black", linewidth=0.8, label="calibrated")
    for item in predictions:
        curve = metrics.reliability_curve(item.values[observed], labels, bins=bins)
        seen = np.asarray(curve.weight) > 50  # fewer labels are noise, not a curve
        x, y = np.asarray(curve.mean_prediction)[seen], np.asarray(curve.mean_label)[seen]
        axes.plot(x, y, _STYLES[item.kind], marker=".", label=item.name)
    axes.set(xlabel="mean prediction", ylabel="share accepted", title="Reliability, observed slots", aspect="equal")


def _auc(axes, rows):
    for name in dict.fromkeys(row["estimator"] for row in rows):
        mine = [row for row in rows if row["estimator"] == name and row["position"] != "all"]
        positions = [row["position"] for row in mine]
        axes.plot(positions, [row["auc"] for row in mine], _STYLES[mine[0]["class"]], marker=".", label=name)
    axes.set(xlabel="draft position", ylabel="AUC", title="AUC by position, observed slots")


def _survival(axes, predictions, rounds):
    """Mean predicted survival against the share of blocks whose first i drafts were all accepted."""
    positions = np.arange(1, rounds.valid.shape[-1] + 1)
    accepted = rounds.labels.observed & rounds.labels.accepted
    axes.plot(positions, accepted.mean(axis=(0, 1)), color="black", linewidth=2, label="measured")
    for item in predictions:
        survival = np.cumprod(item.values.astype(np.float64), axis=-1).mean(axis=(0, 1))
        axes.plot(positions, survival, _STYLES[item.kind], marker=".", label=item.name)
    axes.set(
        xlabel="draft position",
        ylabel="survival",
        yscale="log",
        title="Survival: all drafts up to i accepted",
    )
