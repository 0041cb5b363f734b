"""Notebooks: every script runs from top to bottom, and the executed notebook beside it is made from it."""

import os
import pathlib
import subprocess
import sys

import jupytext
import nbformat
import pytest

FOLDER = pathlib.Path(__file__).parents[1] / "notebooks"
SCRIPTS = sorted(FOLDER.glob("*.py"))


def test_there_are_notebooks():
    assert SCRIPTS and {s.stem for s in SCRIPTS} == {n.stem for n in FOLDER.glob("*.ipynb")}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_notebook_is_the_executed_script(script):
    wanted = [cell for cell in jupytext.read(script).cells if cell.source.strip()]
    notebook = nbformat.read(script.with_suffix(".ipynb"), as_version=4)
    assert [(c.cell_type, c.source) for c in notebook.cells] == [(c.cell_type, c.source) for c in wanted]
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    errors = [output for cell in code for output in cell.outputs if output.output_type == "error"]
    assert not errors
    assert script.with_suffix(".ipynb").stat().st_size < 400_000


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_script_runs(script, tmp_path):
    environment = os.environ | {"MPLBACKEND": "agg", "PYTHONPATH": str(FOLDER.parent), "XLA_FLAGS": ""}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
