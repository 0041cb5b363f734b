"""Labelled drafts: a user's own arrays to labels and features, and their Parquet files.

Work in progress: the names below are being written.
"""
