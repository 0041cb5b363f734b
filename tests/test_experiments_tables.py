"""The main job in small: files that parse, an interrupted run that loses and doubles nothing, damage, seeds."""

import json

import jax
import numpy as np
import pytest

from experiments import collect, tables
from experiments.collect import Settings
from experiments.replay import prequential
from specav import estimators
from specav.features import FEATURES

ARGUMENTS = ["--batches", "2", "--rounds", "2", "--batch", "4"]
SETTINGS = Settings(num_batches=2, rounds=2, batch=4)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A finished run: its folder and the drafts it rests on."""
    out = tmp_path_factory.mktemp("job") / "tables"
    tables.main([*ARGUMENTS, "--out", str(out)])
    return out, collect.collect(SETTINGS, out.parent / "drafts")


def equal(a, b):
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(left, right)


def test_tables_and_figures_are_written(made):
    out, rounds = made
    written = json.loads((out / "tables.json").read_text())
    assert written["meta"]["slots"] == rounds.valid.sum() and "--rounds 2" in written["meta"]["command"]
    overall = {row["estimator"]: row for row in written["rows"] if row["position"] == "all"}
    assert {f"online {name}" for name in FEATURES} < set(overall)
    assert overall["ceiling a"]["log_loss"] < min(r["log_loss"] for r in overall.values() if r["class"] != "ceiling")
    assert all(row["n"] == written["meta"]["observed"] for row in overall.values())
    assert "| vllm_online |" in (out / "tables.md").read_text()
    assert {"reliability.png", "auc.png", "survival.png"} <= {path.name for path in out.iterdir()}


def test_drafts_are_whole(made):
    _, rounds = made
    shape = (SETTINGS.num_batches * SETTINGS.rounds, SETTINGS.batch, SETTINGS.num_draft_tokens)
    assert rounds.valid.shape == shape and rounds.request.shape == shape[:2]
    assert len(np.unique(rounds.request)) == SETTINGS.num_batches * SETTINGS.batch
    assert np.all(rounds.labels.accepted <= rounds.valid) and np.all(rounds.labels.observed <= rounds.valid)
    assert np.all((rounds.token_acceptance >= 0) & (rounds.token_acceptance <= 1))


def test_an_interrupted_run_continues_and_a_damaged_part_is_made_again(made, monkeypatch):
    out, rounds = made
    parts = sorted((out.parent / "drafts").glob("*/batch-*.npz"))
    assert len(parts) == SETTINGS.num_batches
    first, second = (path.read_bytes() for path in parts)
    parts[1].write_bytes(second[: len(second) // 2])  # cut off in the middle
    parts[1].with_suffix(".partial").write_bytes(b"left behind by a kill")
    saved = []
    save = collect._save
    monkeypatch.setattr(collect, "_save", lambda path, part: (saved.append(path), save(path, part)))
    equal(collect.collect(SETTINGS, out.parent / "drafts"), rounds)
    assert saved == [parts[1]]  # the finished part was not touched
    assert parts[0].read_bytes() == first


@pytest.mark.slow
def test_other_settings_make_other_drafts(made):
    out, _ = made
    folders = {path.name for path in (out.parent / "drafts").iterdir()}
    other = SETTINGS._replace(seed=1, num_batches=1)
    again = collect.collect(other, out.parent / "drafts")
    assert {path.name for path in (out.parent / "drafts").iterdir()} > folders
    assert again.valid.shape[0] == SETTINGS.rounds


def test_predictions_come_before_what_they_learn_from(made):
    """Flipping the labels of the last round leaves every prediction bit-identical."""
    _, rounds = made
    accepted = rounds.labels.accepted.copy()
    accepted[-1] = ~accepted[-1]
    flipped = rounds._replace(labels=rounds.labels._replace(accepted=accepted))
    estimator = estimators.online_logistic(SETTINGS.num_draft_tokens, ("logit_q_max",), refit_interval=1)
    before, after = (prequential(estimator, drafts) for drafts in (rounds, flipped))
    np.testing.assert_array_equal(before, after)
    earlier = rounds._replace(labels=rounds.labels._replace(accepted=~rounds.labels.accepted))
    assert np.any(prequential(estimator, earlier) != before)
