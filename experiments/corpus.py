"""Text for the experiments: what every Python installation carries, split into training and held-out documents.

Two sources need no file: the source of the standard library ("code") and the language reference that `help()`
shows, `pydoc_data.topics` ("prose"). A data folder adds public benchmark text ("maths", "problems", "chat").

A document's side depends on a hash of its name alone, about one in ten is held out. Names are normalised so that a
module stays on its side when a later Python turns it into a package or hides it behind an underscore.
"""

import gzip
import hashlib
import json
import re
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32, UInt16

HELD_OUT_SHARE = 0.1
PACKAGED = ("code", "prose")
DATA_FILES = {
    "maths": ("gsm8k_train.jsonl", "gsm8k_test.jsonl"),
    "problems": ("HumanEval.jsonl.gz",),
    "chat": ("mt_bench_question.jsonl", "spec_bench_question.jsonl"),
}
WORKLOADS = (*PACKAGED, *DATA_FILES)

_SKIPPED_FOLDERS = {
    *("__pycache__", "site-packages", "dist-packages", "lib-dynload", "_bundled"),
    *("test", "tests", "idle_test", "encodings"),
}
# Generated tables, obfuscated text and files that differ from machine to machine.
_SKIPPED_FILES = {
    "html/entities.py",
    "re/_casefix.py",
    "stringprep.py",
    "this.py",
    "pydoc_data/topics.py",
}
_SKIPPED_PREFIXES = ("_sysconfigdata", "config-")
# Modules that became packages with the old text under a new name.
_MOVED = {"pathlib/local": "pathlib", "pathlib/abc": "pathlib"}


class Document(NamedTuple):
    """One text: `name` decides its side, `workload` is one of `WORKLOADS`."""

    name: str
    workload: str
    text: str


def is_held_out(name: str) -> bool:
    """True for about `HELD_OUT_SHARE` of all names; the same on every machine and Python."""
    digest = hashlib.sha256(_normalised(name).encode()).digest()
    return int.from_bytes(digest[:4], "big") < HELD_OUT_SHARE * 2**32


def documents(held_out: bool, data: Path | str | None = None) -> list[Document]:
    """Returns all documents of one side, sorted by workload and name.

    Args:
      held_out: which side.
      data: folder with some of the files of `DATA_FILES`; absent files are skipped.

    Raises:
      FileNotFoundError: `data` is not a folder, or holds none of the files.
      ValueError: a line of a data file is not what its format says.
    """
    found = list(_packaged())
    if data is not None:
        found += _data_documents(Path(data))
    held = {doc.name for doc in found if _side(doc)}
    # The topics quote one another; what the held-out ones contain is taken out of the others.
    seen = {p for doc in found if doc.workload == "prose" and doc.name in held for p in _paragraphs(doc.text)}
    chosen = []
    for doc in sorted(found, key=lambda d: (WORKLOADS.index(d.workload), d.name)):
        if (doc.name in held) != held_out:
            continue
        if doc.workload == "prose" and not held_out:
            kept = [p for p in re.split(r"\n{2,}", doc.text) if len(p) < 40 or p.strip() not in seen]
            doc = doc._replace(text="\n\n".join(kept))
        chosen.append(doc)
    return chosen


def token_stream(tokenizer: Any, docs: list[Document]) -> UInt16[np.ndarray, " N"]:
    """Returns the documents' tokens, one after the other, each followed by the end-of-sequence token."""
    encodings = tokenizer.encode_batch([doc.text for doc in docs])
    stream = [np.asarray([*tokens, tokenizer.eos], np.uint16) for tokens in encodings]
    return np.concatenate(stream) if stream else np.zeros(0, np.uint16)


def held_out_prompts(
    tokenizer: Any,
    workload: str,
    num_prompts: int,
    length: int,
    *,
    seed: int = 0,
    data: Path | str | None = None,
) -> Int32[np.ndarray, "N P"]:
    """Returns `num_prompts` windows of `length` tokens of held-out text, each beginning at the start of a line.

    Lines are drawn without replacement, so prompts may overlap but never begin at the same line.

    Raises:
      ValueError: the workload is unknown, needs `data`, or has fewer than `num_prompts` such lines.
    """
    if workload not in WORKLOADS:
        raise ValueError(f"workload: expected one of {', '.join(WORKLOADS)}, got {workload!r}")
    texts = [doc.text for doc in documents(True, data) if doc.workload == workload]
    if not texts:
        raise ValueError(f"workload: {workload!r} needs data, a folder with {DATA_FILES.get(workload)}")
    starts = [(i, m.start()) for i, text in enumerate(texts) for m in re.finditer(r"^(?=.*\S)", text, re.M)]
    order = np.random.default_rng(seed).permutation(len(starts))
    rows: list[list[int]] = []
    for index in order:
        if len(rows) == num_prompts:
            break
        i, start = starts[index]
        # A token is at most as many characters as the longest run of blanks; 16 each is ample, else the row is skipped.
        tokens = tokenizer.encode(texts[i][start : start + 16 * length])[:length]
        if len(tokens) == length:
            rows.append(tokens)
    if len(rows) < num_prompts:
        raise ValueError(
            f"num_prompts: {workload!r} has {len(rows)} held-out lines followed by {length} tokens, "
            f"{num_prompts} were asked for"
        )
    return np.asarray(rows, np.int32).reshape(num_prompts, length)


def _normalised(name: str) -> str:
    name = re.sub(r"(/__init__)?\.py$", "", name)
    name = "/".join(re.sub(r"^_(py)?(?!_)", "", part) or part for part in name.split("/"))
    return _MOVED.get(name, name)


def _side(doc: Document) -> bool:
    if doc.workload == "maths":  # published with a split of its own
        return doc.name.startswith("gsm8k_test")
    return is_held_out(doc.name)


def _paragraphs(text: str) -> set[str]:
    return {p.strip() for p in re.split(r"\n{2,}", text) if len(p) >= 40}


@cache
def _packaged() -> tuple[Document, ...]:
    return (*_library(), *_topics())


def _library() -> Iterator[Document]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if _SKIPPED_FOLDERS.intersection(relative.parts[:-1]) or relative.as_posix() in _SKIPPED_FILES:
            continue
        if relative.parts[0].startswith(_SKIPPED_PREFIXES):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if text.strip():
            yield Document(relative.as_posix(), "code", text)


def _topics() -> Iterator[Document]:
    from pydoc_data.topics import topics

    for name, text in sorted(topics.items()):
        yield Document(f"topics/{name}", "prose", text.strip() + "\n")


def _data_documents(folder: Path) -> Iterator[Document]:
    if not folder.is_dir():
        raise FileNotFoundError(f"data: {folder} is not a folder")
    names = [(workload, name) for workload, files in DATA_FILES.items() for name in files]
    present = [(workload, folder / name) for workload, name in names if (folder / name).is_file()]
    if not present:
        raise FileNotFoundError(f"data: {folder} holds none of {', '.join(name for _, name in names)}")
    for workload, path in present:
        stem = path.name.split(".")[0]
        for number, record in enumerate(_records(path), start=1):
            try:
                text = _record_text(workload, record)
            except (KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number}: not a record of this data set ({error!r})") from error
            yield Document(f"{stem}/{number}", workload, text.strip() + "\n")


def _records(path: Path) -> Iterator[Any]:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    yield json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(f"{path}, line {number}: not JSON ({error})") from error


def _record_text(workload: str, record: Any) -> str:
    if workload == "maths":
        return record["question"] + "\n" + record["answer"]
    if workload == "problems":
        return record["prompt"] + record["canonical_solution"]
    return "\n".join(record["turns"])
