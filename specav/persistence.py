r"""Saves a pytree of arrays, such as an estimator's state, to one small file, and refuses what it did not write.

Layout of a file, all integers little-endian:

    magic       8 bytes, b"specav\r\n"
    version     uint32, FORMAT_VERSION
    length      uint64, bytes of the header
    checksum    SHA-256 of everything before and after these 32 bytes
    header      JSON: {"kind", "metadata", "leaves": [{"path", "dtype", "shape"}, ...]}
    leaves      their raw bytes in that order, C order, nothing between or behind

No pickle: reading a file runs no code and builds nothing but arrays. Typed PRNG keys are not arrays of numbers; store
`jax.random.key_data` of them.
"""

import contextlib
import hashlib
import json
import os
import struct
import uuid
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

MAGIC = b"specav\r\n"  # the line end shows text-mode damage
FORMAT_VERSION = 1
_PREFIX = struct.Struct("<8sIQ")
_CHECKSUM_SIZE = 32
# By name, so that a header cannot ask for anything else (objects, strings, ...).
_DTYPES = {
    np.dtype(dtype).name: np.dtype(dtype)
    for dtype in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", jnp.bfloat16),
    )
}


def save_state(
    path: str | os.PathLike,
    state: Any,
    *,
    kind: str = "state",
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Writes `state` to `path`, whole or not at all: to a temporary file beside it first, then by atomic rename.

    Call it outside of jit; it waits for the arrays.

    Args:
      path: file to write or replace.
      state: pytree whose leaves are arrays or numbers, bool, int, float16/32/64 or bfloat16.
      kind: what the state is, checked by `load_state` if it is told.
      metadata: anything JSON can hold, to read back with `read_metadata`.

    Raises:
      TypeError: a leaf of another kind, named by its path; or metadata that JSON cannot hold.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    entries, blobs = [], []
    for keys, leaf in leaves:
        name = jax.tree_util.keystr(keys)
        dtype = getattr(leaf, "dtype", None)
        if dtype is not None and dtype not in _DTYPES.values():
            raise TypeError(f"state{name}: expected a leaf of a plain dtype, got {dtype}")
        array = np.asarray(leaf)
        if array.dtype not in _DTYPES.values():
            raise TypeError(f"state{name}: expected an array of numbers, got {type(leaf).__name__}")
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
        entries.append({"path": name, "dtype": array.dtype.name, "shape": list(array.shape)})
        blobs.append(array.tobytes())
    header = json.dumps({"kind": kind, "metadata": dict(metadata or {}), "leaves": entries}).encode()
    body = header + b"".join(blobs)
    prefix = _PREFIX.pack(MAGIC, FORMAT_VERSION, len(header))
    _write_atomically(os.fspath(path), prefix + _checksum(prefix, body) + body)


def load_state(path: str | os.PathLike, like: Any, *, kind: str | None = None) -> Any:
    """Reads a state back, bit for bit.

    Args:
      path: a file written by `save_state`.
      like: a state of the same structure, shapes and dtypes, e.g. `estimator.init()` or its `jax.eval_shape`. Its
        values are not read.
      kind: if given, the kind the file must have.

    Returns:
      A pytree with the structure of `like` and jax arrays as leaves (numpy arrays where jax has not the dtype, as
      float64 without x64).

    Raises:
      ValueError: the file is damaged, truncated, foreign, of another version or kind, or holds a state of another
        structure, shape or dtype. The message names the file, and the leaf where there is one.
      OSError: the file cannot be read.
    """
    path = os.fspath(path)
    header, payload = _read(path)
    if kind is not None and header["kind"] != kind:
        raise ValueError(f"{path}: expected a file of kind {kind!r}, got {header['kind']!r}")
    wanted, structure = jax.tree_util.tree_flatten_with_path(like)
    stored = {entry["path"]: entry for entry in header["leaves"]}
    names = [jax.tree_util.keystr(keys) for keys, _ in wanted]
    for name in names:
        if name not in stored:
            raise ValueError(f"{path}: expected a leaf state{name}, the file has none")
    for name in stored:
        if name not in names:
            raise ValueError(f"{path}: holds a leaf state{name}, which the given state has not")
    arrays, offset = {}, 0
    for entry in header["leaves"]:
        dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        raw = np.frombuffer(payload[offset : offset + size], dtype.newbyteorder("<")).reshape(shape)
        arrays[entry["path"]] = raw.astype(dtype)
        offset += size
    leaves = []
    for name, (_, leaf) in zip(names, wanted, strict=True):
        array = arrays[name]
        shape = tuple(np.shape(leaf))
        dtype = np.dtype(leaf.dtype) if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
        if (array.shape, array.dtype) != (shape, dtype):
            raise ValueError(
                f"{path}: expected state{name} to be {dtype.name} {list(shape)}, "
                f"got {array.dtype.name} {list(array.shape)}"
            )
        leaves.append(jnp.asarray(array) if jax.dtypes.canonicalize_dtype(dtype) == dtype else array)
    return jax.tree_util.tree_unflatten(structure, leaves)


def read_metadata(path: str | os.PathLike) -> dict[str, Any]:
    """The metadata that was given to `save_state`. Raises as `load_state` does for a damaged or foreign file."""
    return _read(os.fspath(path))[0]["metadata"]


def _read(path: str) -> tuple[dict[str, Any], bytes]:
    """The checked header and the bytes behind it."""
    with open(path, "rb") as file:
        data = file.read()
    start = _PREFIX.size + _CHECKSUM_SIZE
    if data[: len(MAGIC)] != MAGIC[: len(data)] or not data:
        raise ValueError(f"{path}: not a specav state file")
    if len(data) < start:
        raise ValueError(f"{path}: truncated, {len(data)} bytes of a prefix of {start}")
    _, version, length = _PREFIX.unpack_from(data)
    if version != FORMAT_VERSION:
        raise ValueError(f"{path}: expected format version {FORMAT_VERSION}, got {version}")
    prefix, checksum, body = data[: _PREFIX.size], data[_PREFIX.size : start], data[start:]
    if _checksum(prefix, body) != checksum:
        raise ValueError(f"{path}: damaged or truncated, the checksum does not match its {len(data)} bytes")
    try:
        header = json.loads(body[:length])
        sizes = [
            int(np.prod(entry["shape"], dtype=np.int64)) * _DTYPES[entry["dtype"]].itemsize
            for entry in header["leaves"]
            if isinstance(entry["path"], str) and all(type(n) is int and n >= 0 for n in entry["shape"])
        ]
        sound = len(sizes) == len(header["leaves"]) and sum(sizes) == len(body) - length
        sound = sound and isinstance(header["kind"], str) and isinstance(header["metadata"], dict)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: malformed header ({type(error).__name__}: {error})") from error
    if not sound:
        raise ValueError(f"{path}: malformed header, it does not describe the {len(body) - length} bytes behind it")
    return header, body[length:]


def _checksum(prefix: bytes, body: bytes) -> bytes:
    """SHA-256 over all bytes of the file but its own."""
    return hashlib.sha256(prefix + body).digest()


def _write_atomically(path: str, data: bytes) -> None:
    """Writes to a temporary file in the same folder, flushes it to disk, and renames it."""
    folder, name = os.path.split(os.path.abspath(path))
    temporary = os.path.join(folder, f".{name}.{uuid.uuid4().hex}")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
