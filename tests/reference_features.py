"""float64 features, one row at a time in plain NumPy: complements are sums over the tokens left in."""

import math

import numpy as np


def row_features(logits, token=None, temperature=1.0):
    """dict of float64 features of one row, by the definitions: probabilities relative to the largest logit."""
    z = np.asarray(logits, np.float64)
    z = np.where(np.isnan(z), -np.inf, z)
    if np.any(z == np.inf):
        z = np.where(z == np.inf, 0.0, -np.inf)
    if not np.any(z > -np.inf):
        return {"logit_q_max": -40.0, "entropy": 0.0, "margin": 0.0, "log_collision": 0.0, "logit_q_sampled": -40.0}
    z = z / (temperature if temperature > 0 else 1.0)
    z = z - z.max()
    weights = np.exp(z)
    order = np.argsort(-z, kind="stable")
    others = weights[order[1:]]
    rest = math.fsum(others)
    gaps = -z[order[1:]]
    finite = others > 0
    entropy = np.log1p(rest) + math.fsum(others[finite] * gaps[finite]) / (1 + rest)
    collision = np.log1p(math.fsum(others**2)) - 2 * np.log1p(rest)
    found = {
        "logit_q_max": 40.0 if rest == 0 else min(-math.log(rest), 40.0),
        "entropy": entropy,
        "margin": min(gaps[0], 40.0) if len(gaps) else 40.0,
        "log_collision": collision,
    }
    if token is not None:
        if not 0 <= token < len(z) or z[token] == -np.inf:
            found["logit_q_sampled"] = -40.0
        else:
            without = math.fsum(np.delete(weights, token))
            odds = math.inf if without == 0 else z[token] - math.log(without)
            found["logit_q_sampled"] = float(np.clip(odds, -40.0, 40.0))
    return found


def features(logits, tokens=None, temperature=1.0):
    """Row by row over any leading axes."""
    logits = np.asarray(logits)
    leading = logits.shape[:-1]
    rows = logits.reshape(-1, logits.shape[-1]).astype(np.float64)
    temperature = np.broadcast_to(np.asarray(temperature, np.float64), leading).reshape(-1)
    tokens = [None] * len(rows) if tokens is None else np.asarray(tokens).reshape(-1)
    found = [row_features(r, t, s) for r, t, s in zip(rows, tokens, temperature, strict=True)]
    return {name: np.array([row[name] for row in found]).reshape(leading) for name in found[0]}
