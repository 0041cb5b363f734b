"""Labelled drafts: what a draft model proposed, what its features were, and what the target made of it.

`from_logits` turns a user's own arrays into `LabelledDrafts`, flat columns with one entry per draft; `to_rounds` lays
them out as [R, B, K], so that an estimator can be replayed on them in order. Parquet files hold the same columns
(`SCHEMA`); writing and reading them needs pyarrow: `pip install "specav[traces]"`.
"""

from specav.traces.drafts import LabelledDrafts, Rounds, concatenate, from_logits, to_rounds
from specav.traces.parquet import Writer, iter_batches, read_metadata, read_parquet, write_parquet
from specav.traces.schema import FORMAT, SCHEMA, VERSION, Column, validate

__all__ = [
    "FORMAT",
    "SCHEMA",
    "VERSION",
    "Column",
    "LabelledDrafts",
    "Rounds",
    "Writer",
    "concatenate",
    "from_logits",
    "iter_batches",
    "read_metadata",
    "read_parquet",
    "to_rounds",
    "validate",
    "write_parquet",
]
