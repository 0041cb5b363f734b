"""Executes the notebooks: every notebooks/*.py becomes an .ipynb with its outputs beside it.

python -m experiments.notebooks [names]
"""

import argparse
import pathlib

import jupytext
import nbformat
from nbclient import NotebookClient
from tqdm import tqdm

FOLDER = pathlib.Path(__file__).parents[1] / "notebooks"


def execute(script: pathlib.Path) -> pathlib.Path:
    """Runs a percent script as a notebook, in its folder, and writes the notebook beside it; raises if a cell fails."""
    notebook = jupytext.read(script)
    notebook.cells = [cell for cell in notebook.cells if cell.source.strip()]
    NotebookClient(
        notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}}
    ).execute()
    for index, cell in enumerate(notebook.cells):  # no times and no random names: a rerun changes outputs only
        cell.id = f"cell-{index}"
        cell.metadata = {}
    path = script.with_suffix(".ipynb")
    nbformat.write(notebook, path)
    return path


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Executes the notebooks.")
    parser.add_argument("names", nargs="*", help="without ending; default: all")
    names = parser.parse_args(arguments).names
    for script in tqdm([s for s in sorted(FOLDER.glob("*.py")) if not names or s.stem in names]):
        execute(script)


if __name__ == "__main__":
    main()
