"""Parquet files of labelled drafts: written whole or not at all, checked on the way in and out, read in a stream.

The columns are those of `specav.traces.SCHEMA`; a file may hold more, which are ignored. The key-value metadata of the
file holds

* `specav.format`: "specav-labelled-drafts", and `specav.version`: "1". A file without them is refused.
* `specav.metadata`: a JSON object of strings, the user's (drafter, workload, sampling, seed, ...). May be missing.
* `specav.checksums`: a JSON object with the CRC-32 of that metadata (`metadata`) and of each row group (`row_groups`),
  over the bytes of its columns in order (little-endian, bool as one byte, null as the NaN 0x7fc00000). May be
  missing in files of other tools: such a file is read without this check.

Parquet's own page checksums cover only the pages; these cover what a reader gets, so that damage anywhere in the file
is either found or harmless.
"""

import contextlib
import json
import os
import secrets
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from specav._checks import static_int
from specav.traces.drafts import LabelledDrafts, concatenate
from specav.traces.schema import FORMAT, SCHEMA, VERSION, validate

_FORMAT_KEY, _VERSION_KEY = "specav.format", "specav.version"
_METADATA_KEY, _CHECKSUMS_KEY = "specav.metadata", "specav.checksums"


def write_parquet(path: str | os.PathLike, drafts: LabelledDrafts, metadata: Mapping[str, str] | None = None) -> None:
    """Writes labelled drafts to a file, which appears under its name only when complete. See `Writer`."""
    with Writer(path, metadata) as writer:
        writer.write(drafts)


def read_parquet(path: str | os.PathLike) -> tuple[LabelledDrafts, dict[str, str]]:
    """Reads a whole file of labelled drafts.

    Args:
      path: a file that follows `specav.traces.SCHEMA`.

    Returns:
      The drafts, NumPy arrays [N], and the metadata.

    Raises:
      ValueError: the file is truncated, damaged, of another format, or has a column or row that breaks the schema; the
        message names file, column and row.
      OSError: it cannot be opened.
      ImportError: pyarrow is missing.
    """
    with _open(path) as (file, metadata, checksums):
        parts = list(_row_groups(path, file, checksums, batch_size=None))
    return concatenate([_empty(), *parts]), metadata


def read_metadata(path: str | os.PathLike) -> dict[str, str]:
    """The metadata of a file, without its rows. Raises as `read_parquet`."""
    with _open(path) as (_, metadata, _):
        return metadata


def iter_batches(path: str | os.PathLike, batch_size: int) -> Iterator[LabelledDrafts]:
    """Reads a file as a stream, in memory that does not grow with the file.

    Args:
      path: as for `read_parquet`. It is opened at the first batch and closed after the last.
      batch_size: rows in a batch, at least 1; the last one may be shorter.

    Returns:
      An iterator over `LabelledDrafts`. It holds one row group at a time (65,536 rows unless the writer chose
      otherwise), or single batches where the file has no checksums.

    Raises:
      TypeError, ValueError, OSError, ImportError: as `read_parquet`, on reaching the damaged or offending row group.
    """
    return _batches(path, static_int("batch_size", batch_size, 1))


class Writer:
    """Writes a file of labelled drafts piece by piece.

    A context manager. The rows go to a hidden file beside the final one, which takes the final name when the `with`
    block ends without an error, in one step. An error removes it; only a killed process leaves one behind
    (`.NAME.*.tmp`). Nothing of what stood under the name before is touched until then.

    Example:
      >>> with Writer("drafts.parquet", {"drafter": "bigram"}) as writer:                     # doctest: +SKIP
      ...     for drafts in rounds:
      ...         writer.write(drafts)

    Args:
      path: final name; its folder must exist.
      metadata: strings by name.
      row_group_size: rows that are held in memory and written together, at least 1.

    Raises:
      TypeError, ValueError: wrong arguments; in `write`, drafts that break the schema.
      ImportError: pyarrow is missing.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        metadata: Mapping[str, str] | None = None,
        *,
        row_group_size: int = 65_536,
    ) -> None:
        self._path = os.fspath(path)
        self._metadata = _as_json(metadata)
        self._row_group_size = static_int("row_group_size", row_group_size, 1)
        self._arrow, self._parquet = _import_pyarrow()
        self._pending: list[LabelledDrafts] = []
        self._num_pending = self._num_rows = 0
        self._checksums: list[int] = []
        self._stack: contextlib.ExitStack | None = None
        self._writer: Any = None

    def __enter__(self) -> "Writer":
        """Opens the hidden file."""
        if self._stack is not None:
            raise ValueError(f"{self._path}: the writer has been opened before")
        folder, name = os.path.split(os.path.abspath(self._path))
        self._hidden = os.path.join(folder, f".{name}.{secrets.token_hex(8)}.tmp")
        with contextlib.ExitStack() as stack:
            self._sink = stack.enter_context(open(self._hidden, "xb"))
            stack.callback(_remove, self._hidden)
            floats = [name for name, column in SCHEMA.items() if column.dtype == "float32"]
            self._writer = self._parquet.ParquetWriter(
                self._sink,
                _arrow_schema(self._arrow),
                compression="zstd",
                use_dictionary=[name for name, column in SCHEMA.items() if column.dtype == "int32"],
                use_byte_stream_split=floats,
                write_page_checksum=True,
                store_schema=False,
            )
            self._stack = stack.pop_all()
        return self

    def write(self, drafts: LabelledDrafts) -> None:
        """Appends drafts, after checking them (`specav.traces.validate`); rows are numbered over the whole file."""
        if self._writer is None:
            raise ValueError(f"{self._path}: the writer is not open; use it in a with statement")
        validate(drafts, source=self._path, first_row=self._num_rows)
        # A copy: the caller may reuse its arrays before the row group is written.
        self._pending.append(LabelledDrafts(*(np.array(column) for column in drafts)))
        self._num_rows += len(drafts.request)
        self._num_pending += len(drafts.request)
        if self._num_pending >= self._row_group_size:
            self._flush(self._row_group_size)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Gives the file its name, or removes it after an error."""
        assert self._stack is not None
        with self._stack:
            try:
                if kind is None:
                    self._flush(1)
                    checksums = {"metadata": zlib.crc32(self._metadata.encode()), "row_groups": self._checksums}
                    self._writer.add_key_value_metadata(
                        {
                            _FORMAT_KEY: FORMAT,
                            _VERSION_KEY: str(VERSION),
                            _METADATA_KEY: self._metadata,
                            _CHECKSUMS_KEY: json.dumps(checksums),
                        }
                    )
            finally:
                self._writer.close()
                self._writer = None
            if kind is None:
                self._sink.flush()
                os.fsync(self._sink.fileno())
                os.replace(self._hidden, self._path)

    def _flush(self, least: int) -> None:
        """Writes row groups while at least `least` rows are pending."""
        if not self._pending:
            return
        drafts = concatenate(self._pending)
        start, end = 0, len(drafts.request)
        while end - start >= least:
            group = _rows(drafts, start, start + self._row_group_size)
            self._writer.write_table(_to_arrow(self._arrow, group), row_group_size=self._row_group_size)
            self._checksums.append(_checksum(group))
            start += len(group.request)
        self._pending = [_rows(drafts, start, end)]
        self._num_pending = end - start


def _batches(path, batch_size):
    """The generator behind `iter_batches`: cuts what comes from the row groups into equal batches."""
    held = _empty()
    with _open(path) as (file, _, checksums):
        for part in _row_groups(path, file, checksums, batch_size):
            held = concatenate([held, part])
            whole = len(held.request) // batch_size * batch_size
            for start in range(0, whole, batch_size):
                yield _rows(held, start, start + batch_size)
            held = _rows(held, whole, len(held.request))
    if len(held.request):
        yield held


@contextlib.contextmanager
def _open(path):
    """(ParquetFile, metadata, checksums of the row groups or None) of a file whose header and columns fit."""
    arrow, parquet = _import_pyarrow()
    with open(path, "rb") as raw:
        with _damage_is_value_error(path):
            file = parquet.ParquetFile(raw, page_checksum_verification=True)
            keys = {k.decode("latin-1"): v for k, v in (file.metadata.metadata or {}).items()}
            schema = file.schema_arrow
        if keys.get(_FORMAT_KEY) != FORMAT.encode():
            raise ValueError(
                f"{path}: expected a file of format {FORMAT!r} (key {_FORMAT_KEY}), got {keys.get(_FORMAT_KEY)}"
            )
        if keys.get(_VERSION_KEY) != str(VERSION).encode():
            raise ValueError(f"{path}: expected version {VERSION} of {FORMAT}, got {keys.get(_VERSION_KEY)}")
        _check_columns(path, schema, _arrow_schema(arrow))
        with _damage_is_value_error(path):
            text = keys.get(_METADATA_KEY, b"{}").decode()
            metadata, checksums = json.loads(text), None
            if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
                raise ValueError(f"expected a JSON object of strings in {_METADATA_KEY}")
            if _CHECKSUMS_KEY in keys:
                found = json.loads(keys[_CHECKSUMS_KEY].decode())
                checksums = list(found["row_groups"])
                if found["metadata"] != zlib.crc32(text.encode()) or len(checksums) != file.num_row_groups:
                    raise ValueError("the checksums do not fit")
        yield file, metadata, checksums


def _row_groups(path, file, checksums, batch_size):
    """Checked `LabelledDrafts`: one per row group with a checksum, else one per batch."""
    row = 0
    for group in range(file.num_row_groups):
        with _damage_is_value_error(path):
            if checksums is None and batch_size is not None:
                tables = file.iter_batches(batch_size=batch_size, row_groups=[group], columns=list(SCHEMA))
            else:
                tables = iter([file.read_row_group(group, columns=list(SCHEMA))])
        while True:
            with _damage_is_value_error(path):
                table = next(tables, None)
            if table is None:
                break
            drafts = _from_arrow(path, table, row)
            if checksums is not None and _checksum(drafts) != checksums[group]:
                raise ValueError(f"{path}: damaged, the checksum of rows from {row} on does not fit")
            validate(drafts, source=path, first_row=row)
            row += len(drafts.request)
            yield drafts


@contextlib.contextmanager
def _damage_is_value_error(path):
    """Whatever the Parquet reader makes of a damaged file becomes a ValueError that names it."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{path}: not a whole file of labelled drafts: {error}") from error


def _check_columns(path, schema, expected):
    """Every required column is there once, with its type."""
    for field in expected:
        found = [schema.field(i) for i in schema.get_all_field_indices(field.name)]
        if len(found) != 1:
            have = "several columns" if found else f"the columns {', '.join(schema.names)}"
            raise ValueError(f"{path}: column {field.name!r}: expected one of this name, got {have}")
        if found[0].type != field.type:
            raise ValueError(f"{path}: column {field.name!r}: expected {field.type}, got {found[0].type}")


def _from_arrow(path, table, first_row):
    """`LabelledDrafts` from an Arrow table or batch; nulls are NaN where allowed."""
    columns = {}
    for name, column in SCHEMA.items():
        with _damage_is_value_error(path):
            values = table.column(name)
            is_null = values.is_null().to_numpy(zero_copy_only=False)
        if is_null.any() and not column.nullable:
            row = first_row + int(np.argmax(is_null))
            raise ValueError(f"{path}: column {name!r}, row {row}: expected {column.dtype}, got null")
        with _damage_is_value_error(path):
            columns[name] = np.array(values.to_numpy(zero_copy_only=False), np.dtype(column.dtype))
            if column.nullable:
                columns[name] = _plain_nan(columns[name])
    return LabelledDrafts(**columns)


def _to_arrow(arrow, drafts):
    """An Arrow table; NaN becomes null in nullable columns."""
    schema = _arrow_schema(arrow)
    columns = [
        arrow.array(getattr(drafts, field.name), field.type, mask=np.isnan(getattr(drafts, field.name)))
        if field.nullable
        else arrow.array(getattr(drafts, field.name), field.type)
        for field in schema
    ]
    return arrow.Table.from_arrays(columns, schema=schema)


def _arrow_schema(arrow):
    """`SCHEMA` in Arrow's terms."""
    types = {"int32": arrow.int32(), "float32": arrow.float32(), "bool": arrow.bool_()}
    return arrow.schema([arrow.field(name, types[c.dtype], nullable=c.nullable) for name, c in SCHEMA.items()])


def _checksum(drafts):
    """CRC-32 over the columns in the order of `SCHEMA`."""
    crc = 0
    for name, column in SCHEMA.items():
        values = getattr(drafts, name).astype(np.dtype(column.dtype).newbyteorder("<"), copy=False)
        crc = zlib.crc32((_plain_nan(values) if column.nullable else values).tobytes(), crc)
    return crc


def _plain_nan(values):
    """`values` with every NaN the same bits."""
    return np.where(np.isnan(values), np.array(np.nan, values.dtype), values)


def _as_json(metadata):
    """The user's metadata as JSON text."""
    metadata = dict(metadata or {})
    for name, value in metadata.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"metadata: expected strings by name, got {name!r}: {value!r}")
    return json.dumps(metadata)


def _rows(drafts, start, stop):
    """Rows start..stop-1."""
    return LabelledDrafts(*(column[start:stop] for column in drafts))


def _empty():
    """No rows."""
    return LabelledDrafts(**{name: np.zeros(0, np.dtype(column.dtype)) for name, column in SCHEMA.items()})


def _remove(path):
    """Removes a file that may be gone."""
    with contextlib.suppress(FileNotFoundError):
        os.remove(path)


def _import_pyarrow():
    """pyarrow and pyarrow.parquet, imported when they are needed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError('Parquet files need pyarrow: pip install "specav[traces]"') from error
    return pyarrow, pyarrow.parquet
