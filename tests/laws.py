"""Statistics for tests of laws: one chi-square test with a stated level and a stated resolution."""

from typing import NamedTuple

import numpy as np
from scipy import optimize, stats

LEVEL = 1e-6  # of every test of a law in the suite; seeds are fixed, so a failure is a finding
POWER = 0.99


class LawTest(NamedTuple):
    """p-value of the chi-square test, and the total variation above which it rejects with probability 0.99."""

    p_value: float
    detectable_tv: float

    @property
    def passed(self):
        return self.p_value >= LEVEL


def chi_square(counts, law):
    """Tests counts against an exact law. Cells of expected count below 8 are pooled; an impossible cell hit fails.

    A law at total variation d has noncentrality n * sum (p - q)^2 / q >= 4 n d^2 (Cauchy-Schwarz), so the detectable
    d below holds whatever the shape of the fault (pooled cells apart).
    """
    counts, law = np.asarray(counts, np.float64).ravel(), np.asarray(law, np.float64).ravel()
    assert counts.shape == law.shape and abs(law.sum() - 1) < 1e-9
    total = counts.sum()
    if counts[law == 0].any():
        return LawTest(0.0, 0.0)
    counts, law = counts[law > 0], law[law > 0]
    small = law * total < 8
    if small.sum() > 1:
        counts = np.append(counts[~small], counts[small].sum())
        law = np.append(law[~small], law[small].sum())
    if len(law) == 1:
        return LawTest(1.0, 0.0)
    statistic = np.sum((counts - total * law) ** 2 / (total * law))
    freedom = len(law) - 1
    bound = stats.chi2.isf(LEVEL, freedom)
    noncentrality = optimize.brentq(lambda c: stats.ncx2.sf(bound, freedom, c) - POWER, 1e-3, 1e4)
    return LawTest(float(stats.chi2.sf(statistic, freedom)), float(np.sqrt(noncentrality / (4 * total))))


def at_total_variation(law, distance):
    """A law at the given total variation from `law`: mass moved from the likeliest cell to the next one."""
    law = np.array(law, np.float64)
    order = np.argsort(-law)
    assert law[order[0]] > distance
    law[order[0]] -= distance
    law[order[1]] += distance
    return law
