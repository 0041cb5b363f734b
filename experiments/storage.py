"""Checkpoints as .npz files: named arrays and a JSON header, no pickling, damage detected.

bfloat16 has no NumPy dtype of its own; such arrays are stored as uint16 and named in the header.
"""

import hashlib
import json
import os
import zipfile
import zlib
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

_HEADER = "header.json"
_FORMAT = 1


def save_tree(path: Path | str, tree: Any, meta: dict[str, Any]) -> None:
    """Writes nested dicts of arrays, and `meta` (anything JSON holds), in one step: a reader never sees half a file.

    Raises:
      ValueError: a key is not a plain name.
    """
    path = Path(path)
    arrays = {name: np.asarray(leaf) for name, leaf in _flatten(tree)}
    bfloat16 = sorted(name for name, leaf in arrays.items() if leaf.dtype == ml_dtypes.bfloat16)
    arrays |= {name: arrays[name].view(np.uint16) for name in bfloat16}
    header = {"format": _FORMAT, "bfloat16": bfloat16, "sha256": _digest(arrays), "meta": meta}
    text = np.frombuffer(json.dumps(header, sort_keys=True).encode(), np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with open(partial, "wb") as file:
        np.savez(file, **{_HEADER: text, **arrays})  # pyright: ignore[reportArgumentType]
    os.replace(partial, path)


def load_tree(path: Path | str) -> tuple[Any, dict[str, Any]]:
    """Reads what `save_tree` wrote: the nested dicts of NumPy arrays, and `meta`.

    Raises:
      FileNotFoundError: no such file.
      ValueError: the file is truncated, changed, or was written by something else.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such checkpoint")
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        header = json.loads(arrays.pop(_HEADER).tobytes())
        if header["format"] != _FORMAT:
            raise ValueError(f"format {header['format']}, expected {_FORMAT}")
        if header["sha256"] != _digest(arrays):
            raise ValueError("the contents do not fit their checksum")
        for name in header["bfloat16"]:
            arrays[name] = arrays[name].view(ml_dtypes.bfloat16)
        return _nested(arrays), header["meta"]
    except (ValueError, KeyError, TypeError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path}: damaged, or not a checkpoint of this project ({error})") from error


def _flatten(tree: Any) -> list[tuple[str, Any]]:
    found = []
    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        names = [getattr(key, "key", None) for key in keys]
        if not names or not all(isinstance(n, str) and n and "/" not in n and n != _HEADER for n in names):
            raise ValueError(f"tree: expected nested dicts with plain names, got {jax.tree_util.keystr(keys)}")
        found.append(("/".join(map(str, names)), leaf))
    return found


def _nested(arrays: dict[str, np.ndarray]) -> Any:
    tree: dict[str, Any] = {}
    for name, leaf in arrays.items():
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


def _digest(arrays: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        leaf = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {leaf.dtype.str} {leaf.shape}\n".encode())
        digest.update(leaf.tobytes())
    return digest.hexdigest()
