"""The columns of a file of labelled drafts: dtypes, units, ranges, and the check that every row keeps to them."""

import os
from typing import NamedTuple

import numpy as np

from specav.traces.drafts import LabelledDrafts

# Name and version of the file format. The version grows when a required column is added or changes its meaning.
FORMAT = "specav-labelled-drafts"
VERSION = 1


class Column(NamedTuple):
    """A column of `SCHEMA`.

    Attributes:
      dtype: "int32", "float32" or "bool"; the Arrow type is int32, float or bool.
      unit: what one unit is.
      nullable: null where has_target_row is False, never elsewhere (NaN in memory).
      low, high: smallest and largest value.
      doc: one line.
    """

    dtype: str
    unit: str
    nullable: bool
    low: float
    high: float
    doc: str


_MOST = float(2**31 - 1)
_FINITE = float(np.finfo(np.float32).max)
SCHEMA: dict[str, Column] = {
    "request": Column("int32", "index", False, 0, _MOST, "request that the draft belongs to"),
    "round": Column("int32", "index", False, 0, _MOST, "round of drafting and verification; the order of learning"),
    "position": Column("int32", "tokens", False, 0, _MOST, "drafts between the committed tokens and this one"),
    "logit_q_max": Column("float32", "nats", False, -_FINITE, _FINITE, "log-odds of the most likely token"),
    "entropy": Column("float32", "nats", False, -_FINITE, _FINITE, "entropy of the draft law"),
    "margin": Column("float32", "nats", False, -_FINITE, _FINITE, "largest logit minus second largest"),
    "log_collision": Column("float32", "nats", False, -_FINITE, _FINITE, "log sum q^2"),
    "logit_q_sampled": Column("float32", "nats", False, -_FINITE, _FINITE, "log-odds of the drafted token"),
    "q": Column("float32", "probability", False, 0, 1, "draft law at the drafted token"),
    "p": Column("float32", "probability", True, 0, 1, "target law at the drafted token"),
    "a": Column("float32", "probability", True, 0, 1, "min(1, p / q), acceptance of the token"),
    "alpha": Column("float32", "probability", True, 0, 1, "sum_x min(p(x), q(x)), acceptance before the draw"),
    "accepted": Column("bool", "", False, 0, 1, "the draft and all before it passed; only where observed"),
    "observed": Column("bool", "", False, 0, 1, "the draft was tested, all before it having passed"),
    "has_target_row": Column("bool", "", False, 0, 1, "p, a and alpha are known"),
}


def validate(drafts: LabelledDrafts, *, source: str | os.PathLike = "drafts", first_row: int = 0) -> None:
    """Checks every row against `SCHEMA`.

    Columns are one-dimensional, of one length and of their dtype; values lie in their range and are not NaN; p, a and
    alpha are numbers where has_target_row, and NaN elsewhere; what is accepted is observed.

    Args:
      drafts: arrays [N].
      source: named in the messages: the file.
      first_row: number of the first row, for the messages (0-based).

    Raises:
      TypeError: a column of another dtype.
      ValueError: everything else. The message names source, column and row.
    """
    length = np.shape(drafts.request)
    for name, column in SCHEMA.items():
        values = getattr(drafts, name)
        if getattr(values, "dtype", None) != np.dtype(column.dtype):
            got = getattr(values, "dtype", type(values).__name__)
            raise TypeError(f"{source}: column {name!r}: expected {column.dtype}, got {got}")
        if np.ndim(values) != 1 or np.shape(values) != length:
            raise ValueError(
                f"{source}: column {name!r}: expected shape [N] as request {list(length)}, got {list(np.shape(values))}"
            )
    known = np.asarray(drafts.has_target_row)
    for name, column in SCHEMA.items():
        if column.dtype == "bool":
            continue
        values = np.asarray(getattr(drafts, name))
        fits = (values >= column.low) & (values <= column.high)  # False for NaN
        expected = {_MOST: "a number of at least 0", _FINITE: "a finite number", 1: "a number in [0, 1]"}[column.high]
        if column.nullable:
            _require(known | np.isnan(values), values, source, name, first_row, "nothing without a target row")
            fits = fits | ~known
        _require(fits, values, source, name, first_row, expected)
    accepted = np.asarray(drafts.accepted)
    _require(
        ~accepted | np.asarray(drafts.observed), accepted, source, "accepted", first_row, "False where not observed"
    )


def _require(fits, values, source, name, first_row, expected):
    """Raises ValueError for the first row that does not fit."""
    if not fits.all():
        row = int(np.argmin(fits))
        raise ValueError(f"{source}: column {name!r}, row {first_row + row}: expected {expected}, got {values[row]}")
