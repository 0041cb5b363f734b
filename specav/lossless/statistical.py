"""A statistical test of sampled decoders: do decoded sequences follow the exact law, at a stated level and resolution?

Enumeration (`specav.lossless.exact`) judges a policy; this judges a decoder as it runs, kernels, noise and all. Decode
the same prompt many times, count the sequences, and compare with the law worked out from the target alone:

    counts = sequence_counts(tokens, vocabulary)            # tokens int [N, n], one row per run
    test = sequence_test(counts, law, level=1e-6)           # law [V] * n or flat, in lexicographic order
    assert test.passed and test.detectable_tv < 0.02, test

The test is two-sided: whatever moves the law of the first n tokens jointly counts, not only a lean towards the drafter.
To watch a decoder whose sequences cannot be enumerated, see `specav.lossless.monitor`. Host-side code (NumPy, SciPy).

References:
  Pearson, On the criterion that a given system of deviations ..., Philosophical Magazine 50, 1900.
"""

from typing import Any, NamedTuple

import numpy as np

from specav._checks import static_float, static_int

MAX_CELLS = 1 << 24


class LawTest(NamedTuple):
    """Outcome of a chi-square test against an exact law.

    Attributes:
      p_value: probability of a statistic at least as large under the law; 0 if an impossible cell was hit.
      level: the law is rejected when p_value < level.
      detectable_tv: total variation, of the cells as pooled, above which a wrong law is rejected with the probability
        asked for, whatever the shape of the fault; 1 if nothing can be told apart.
      pooled_mass: mass of the law in the cells that were pooled into one. Faults that move mass within it go unseen.
    """

    p_value: float
    level: float
    detectable_tv: float
    pooled_mass: float

    @property
    def passed(self) -> bool:
        """Whether the law was not rejected."""
        return self.p_value >= self.level


def sequence_test(
    counts: np.ndarray, law: np.ndarray, *, level: float = 1e-6, power: float = 0.99, min_expected: float = 50.0
) -> LawTest:
    """Pearson's chi-square test of counts against an exact law.

    A cell that the law excludes must not be hit at all. The least likely cells are pooled until the pool is expected
    at least `min_expected` times. A law at total variation d from this one has noncentrality
    N sum_x (p - q)^2 / q >= 4 N d^2 (Cauchy-Schwarz), hence `detectable_tv`.

    The level is that of the chi-square approximation, whose far tail is too light for small cells. In the worst case,
    two cells of which one is expected m times, the true level at a nominal 1e-6 is 33e-6 for m = 8, 7e-6 for m = 25,
    4e-6 for m = 50 and 3e-6 for m = 100; at a nominal .01 it is within a quarter (exact binomial sums).

    Args:
      counts: int [...], how often each outcome was seen in N independent runs.
      law: float64, as many cells, in the same order; sums to 1 within 1e-9.
      level: probability of rejecting a decoder that is exact.
      power: probability that `detectable_tv` refers to.
      min_expected: smallest expected count of a cell.

    Returns:
      A `LawTest`.

    Raises:
      ValueError: sizes differ, no counts, negative counts, or `law` is no probability vector.
    """
    from scipy import stats  # here: it would double the time that importing specav takes

    level, power = static_float("level", level, 0.0, 1.0), static_float("power", power, 0.0, 1.0)
    seen, expected = np.asarray(counts, np.float64).ravel(), np.asarray(law, np.float64).ravel()
    if seen.shape != expected.shape:
        raise ValueError(f"law: expected as many cells as counts, {seen.size}, got {expected.size}")
    total = seen.sum()
    if not (seen >= 0).all() or not total > 0:
        raise ValueError(f"counts: expected non-negative numbers with a positive sum, got a sum of {total}")
    if not (expected >= 0).all() or not abs(expected.sum() - 1) < 1e-9:
        raise ValueError(f"law: expected probabilities that sum to 1 within 1e-9, got a sum of {expected.sum()!r}")
    impossible = bool(seen[expected == 0].any())
    seen, expected = seen[expected > 0], expected[expected > 0] * total
    seen, expected, pooled = _pool(seen, expected, min_expected)
    freedom = len(expected) - 1
    if freedom == 0:
        p_value = 1.0
        # Either everything was pooled, or the law is a point mass and any other outcome impossible.
        detectable = 1.0 if pooled else 1 - (1 - power) ** (1 / total)
    else:
        p_value = float(stats.chi2.sf(np.sum((seen - expected) ** 2 / expected), freedom))
        detectable = min(1.0, float(np.sqrt(_noncentrality(level, power, freedom) / (4 * total))))
    return LawTest(0.0 if impossible else p_value, level, detectable, float(pooled / total))


def sequence_counts(tokens: np.ndarray, vocabulary: int) -> np.ndarray:
    """Counts decoded sequences: int64 [V^n], in lexicographic order (`counts.reshape((V,) * n)[y_1, .., y_n]`).

    Args:
      tokens: int [N, n], the first n decoded tokens of N independent runs from one context. Runs must not end earlier:
        cut them all to one length, or give an ended run a token of its own.
      vocabulary: V, with V^n at most 2^24. Merge tokens beforehand (`tokens % V`, and the law likewise) if it is large.

    Raises:
      TypeError, ValueError: wrong dtype, shape or size, or a token outside 0..V-1.
    """
    vocabulary = static_int("vocabulary", vocabulary, 1)
    tokens = np.asarray(tokens)
    if not np.issubdtype(tokens.dtype, np.integer):
        raise TypeError(f"tokens: expected an integer dtype, got {tokens.dtype}")
    if tokens.ndim != 2:
        raise ValueError(f"tokens: expected shape [N, n], got {list(tokens.shape)}")
    cells = vocabulary ** tokens.shape[1]
    if cells > MAX_CELLS:
        raise ValueError(f"vocabulary: expected V^n of at most {MAX_CELLS} cells, got {vocabulary}^{tokens.shape[1]}")
    if tokens.size and not (tokens.min() >= 0 and tokens.max() < vocabulary):
        raise ValueError(f"tokens: expected 0..{vocabulary - 1}, got {tokens.min()}..{tokens.max()}")
    index = np.zeros(len(tokens), np.int64)
    for column in tokens.T:
        index = index * vocabulary + column
    return np.bincount(index, minlength=cells)


def _pool(seen, expected, min_expected):
    """Merges the least expected cells into one of at least `min_expected`; returns its expected count, 0 if none."""
    if expected.min() >= min_expected:
        return seen, expected, 0.0
    order = np.argsort(expected, kind="stable")
    seen, expected = seen[order], expected[order]
    enough = np.cumsum(expected) >= min_expected
    # All cells below the minimum, and as many more as it takes.
    size = max(int(np.sum(expected < min_expected)), int(np.argmax(enough)) + 1 if enough.any() else len(expected))
    pool = expected[:size].sum()
    return np.append(seen[size:], seen[:size].sum()), np.append(expected[size:], pool), pool


def _noncentrality(level, power, freedom):
    """Noncentrality at which the test of that level rejects with that power."""
    from scipy import optimize, stats

    bound, high = stats.chi2.isf(level, freedom), 1.0

    def shortfall(noncentrality):
        return stats.ncx2.sf(bound, freedom, noncentrality) - power

    while shortfall(high) < 0:
        high *= 2
    root: Any = optimize.brentq(shortfall, 1e-9, high)
    return float(root)
