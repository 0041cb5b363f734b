"""Tabular models for `exact_output_law`: raw logits looked up by the tokens before."""

from collections.abc import Callable

import numpy as np

# (tokens int32 [N, L], lengths int [N]) -> raw logits float64 [N, V] of the token after the first `lengths` ones
Model = Callable[[np.ndarray, np.ndarray], np.ndarray]


def markov_model(table) -> Model:
    """A model whose logits depend on the last token alone.

    Args:
      table: float64 [tokens, V] raw logits, or [tokens, K, V] for a parallel drafter.
    """
    table = np.asarray(table, np.float64)
    return lambda tokens, lengths: table[tokens[np.arange(len(tokens)), np.asarray(lengths) - 1]]


def table_family(tables) -> Model:
    """M models in one: the first prompt token says which, and the tokens after it are the history.

    Args:
      tables: float64 [M, S, V] raw logits (or [M, S, K, V] for a parallel drafter). With S = 1 + V the logits depend
        on the last token, with S = 1 + V + V^2 on the last two, and so on; shorter histories come first, histories of
        one length in lexicographic order.

    Raises:
      ValueError: S is not one of these numbers.
    """
    tables = np.asarray(tables, np.float64)
    size, starts = tables.shape[-1], [0]  # starts[d]: the first history of d tokens
    while starts[-1] + size ** (len(starts) - 1) < tables.shape[1]:
        starts.append(starts[-1] + size ** (len(starts) - 1))
    depth = len(starts) - 1
    if starts[-1] + size**depth != tables.shape[1]:
        raise ValueError(f"tables: expected 1 + V + ... + V^d histories for V={size}, got {tables.shape[1]}")

    def model(tokens, lengths):
        lengths, rows = np.asarray(lengths), np.arange(len(tokens))
        known, code = np.minimum(lengths - 1, depth), np.zeros(len(tokens), np.int64)
        for back in range(depth, 0, -1):  # the oldest token first
            token = tokens[rows, np.maximum(lengths - back, 0)]
            code = np.where(back <= known, code * size + token, code)
        return tables[tokens[:, 0], np.asarray(starts)[known] + code]

    return model
