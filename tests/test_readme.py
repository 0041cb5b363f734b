"""The README's Python examples run as pasted."""

import pathlib
import re

import jax
import pytest

README = pathlib.Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("index", range(len(BLOCKS)))
def test_examples_run_as_pasted(index, capsys):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # JAX's own defaults
        exec(compile(BLOCKS[index], f"README example {index}", "exec"), {})
    assert capsys.readouterr().out.strip()


def test_the_examples_say_what_the_readme_says(capsys):
    verdicts = next(block for block in BLOCKS if "certify" in block)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        exec(verdicts, {})
    standard, coupled, deferred = capsys.readouterr().out.strip().splitlines()
    assert standard.startswith("standard - leak: whether draft")
    assert coupled.startswith("coupled - proved lossless") and deferred.startswith("deferred - proved lossless")
