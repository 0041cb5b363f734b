"""The suite's chi-square test of a law (`specav.lossless.statistical`), at the level of every such test."""

import numpy as np

from specav.lossless.statistical import LawTest, sequence_test

__all__ = ["LEVEL", "LawTest", "at_total_variation", "chi_square"]

LEVEL = 1e-6  # seeds are fixed, so a failure is a finding


def chi_square(counts, law) -> LawTest:
    """Tests counts against an exact law."""
    return sequence_test(np.asarray(counts), np.asarray(law), level=LEVEL)


def at_total_variation(law, distance):
    """A law at the given total variation from `law`: mass moved from the likeliest cell to the next one."""
    law = np.array(law, np.float64)
    order = np.argsort(-law)
    assert law[order[0]] > distance
    law[order[0]] -= distance
    law[order[1]] += distance
    return law
