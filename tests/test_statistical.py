"""The chi-square test of decoded sequences: its level, its resolution, what it refuses to overlook."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from specav.lossless.statistical import LawTest, sequence_counts, sequence_test
from tests.laws import at_total_variation


def dirichlet(seed, size, concentration=1.0):
    return np.random.default_rng(seed).dirichlet(np.full(size, concentration))


def test_a_hand_worked_case():
    # 60 heads of 100: statistic 10^2/50 + 10^2/50 = 4, one degree of freedom.
    test = sequence_test(np.asarray([60, 40]), np.asarray([0.5, 0.5]), level=0.05)
    assert test.p_value == pytest.approx(0.04550026389635839, abs=1e-12)
    assert test.level == 0.05 and not test.passed and test.pooled_mass == 0
    assert sequence_test(np.asarray([60, 40]), np.asarray([0.5, 0.5]), level=0.04).passed


@given(st.integers(0, 2**32 - 1), st.integers(2, 40), st.integers(1_000, 100_000))
def test_it_is_pearsons_test_where_nothing_is_pooled(seed, size, total):
    law = dirichlet(seed, size, 5.0)
    counts = np.random.default_rng(seed).multinomial(total, law)
    test = sequence_test(counts, law, min_expected=0.0)
    assert test.p_value == pytest.approx(stats.chisquare(counts, law * total).pvalue, rel=1e-9, abs=1e-300)


@pytest.mark.parametrize("concentration", [0.3, 1.0, 10.0])
def test_exact_samples_are_rejected_at_the_level(concentration):
    rng = np.random.default_rng(0)
    law = dirichlet(1, 81, concentration)
    rejected = sum(not sequence_test(rng.multinomial(5_000, law), law, level=0.01).passed for _ in range(2_000))
    assert 5 <= rejected <= 42  # binomial(2000, .01): outside with probability 2e-4 + 5e-6 at most


def test_the_stated_true_levels_of_the_worst_case():
    for expected, level in ((8, 33e-6), (25, 7e-6), (50, 4e-6), (100, 3e-6)):
        total, seen = 1_000_000, np.arange(1_000)
        statistic = (seen - expected) ** 2 / expected + (seen - expected) ** 2 / (total - expected)
        rejected = statistic >= stats.chi2.isf(1e-6, 1)
        assert stats.binom.pmf(seen, total, expected / total)[rejected].sum() == pytest.approx(level, rel=0.1)


@pytest.mark.parametrize("fault", ["two cells", "spread"])
def test_a_law_at_the_detectable_distance_is_rejected_with_the_power(fault):
    rng = np.random.default_rng(2)
    law = dirichlet(3, 16, 20.0)
    total = 20_000
    reach = sequence_test(rng.multinomial(total, law), law).detectable_tv
    assert 0.01 < reach < 0.1
    wrong = at_total_variation(law, reach)
    if fault == "spread":  # the hardest shape: the same relative change in every cell
        signs = np.where(np.arange(16) % 2, 1.0, -1.0)
        up = law[signs > 0].sum()
        wrong = law * (1 + np.where(signs > 0, reach / up, -reach / (1 - up)))
    assert 0.5 * np.abs(wrong - law).sum() == pytest.approx(reach)
    rejected = sum(not sequence_test(rng.multinomial(total, wrong), law).passed for _ in range(500))
    assert rejected >= 0.97 * 500


def test_power_is_what_the_resolution_refers_to():
    law = np.full(4, 0.25)
    counts = np.full(4, 250)
    weak, strong = (sequence_test(counts, law, power=power).detectable_tv for power in (0.5, 0.999))
    assert weak < strong
    assert sequence_test(4 * counts, law, power=0.5).detectable_tv == pytest.approx(weak / 2)


def test_an_impossible_outcome_is_never_overlooked():
    law = np.asarray([0.5, 0.5, 0.0])
    test = sequence_test(np.asarray([500_000, 499_999, 1]), law)
    assert test.p_value == 0 and not test.passed
    assert sequence_test(np.asarray([500_000, 500_000, 0]), law).passed


def test_a_point_mass_and_a_law_of_small_cells_say_what_they_can_tell():
    point = sequence_test(np.asarray([0, 1_000]), np.asarray([0.0, 1.0]))
    assert point.passed and point.detectable_tv == pytest.approx(1 - 0.01**0.001)
    assert not sequence_test(np.asarray([1, 999]), np.asarray([0.0, 1.0])).passed
    blind = sequence_test(np.asarray([10, 0]), np.asarray([0.5, 0.5]))
    assert blind == LawTest(1.0, 1e-6, 1.0, 1.0)


def test_small_cells_are_pooled_and_still_count_together():
    law = np.append(np.full(100, 1e-4), [0.5, 0.49])
    counts = np.append(np.full(100, 1), [5_000, 4_900])
    test = sequence_test(counts, law)
    assert test.passed and test.pooled_mass == pytest.approx(0.01)
    assert not sequence_test(np.append(np.full(100, 2), [4_900, 4_900]), law).passed


def test_a_pool_that_is_too_small_takes_the_next_cell():
    law = np.asarray([0.001, 0.01, 0.489, 0.5])
    test = sequence_test(np.asarray([1, 60, 4_890, 5_049]), law)
    assert test.pooled_mass == pytest.approx(0.011)


def test_sequences_are_counted_in_lexicographic_order():
    tokens = np.asarray([[0, 2, 1], [2, 2, 2], [0, 2, 1], [0, 0, 0]], np.int32)
    counts = sequence_counts(tokens, 3)
    expected = [int((tokens == np.asarray(s)).all(axis=1).sum()) for s in itertools.product(range(3), repeat=3)]
    assert counts.tolist() == expected
    assert counts.reshape(3, 3, 3)[0, 2, 1] == 2


@pytest.mark.parametrize(
    ("error", "match", "call"),
    [
        (ValueError, "as many cells", lambda: sequence_test(np.ones(3), np.full(4, 0.25))),
        (ValueError, "sum to 1", lambda: sequence_test(np.ones(3), np.full(3, 0.3))),
        (ValueError, "sum to 1", lambda: sequence_test(np.ones(2), np.asarray([1.5, -0.5]))),
        (ValueError, "positive sum", lambda: sequence_test(np.zeros(2), np.full(2, 0.5))),
        (ValueError, "positive sum", lambda: sequence_test(np.asarray([3, -1]), np.full(2, 0.5))),
        (ValueError, "level", lambda: sequence_test(np.ones(2), np.full(2, 0.5), level=2.0)),
        (TypeError, "integer", lambda: sequence_counts(np.ones((2, 2)), 3)),
        (ValueError, r"\[N, n\]", lambda: sequence_counts(np.ones(2, np.int32), 3)),
        (ValueError, r"0\.\.2", lambda: sequence_counts(np.asarray([[0, 3]]), 3)),
        (ValueError, r"0\.\.2", lambda: sequence_counts(np.asarray([[0, -1]]), 3)),
        (ValueError, "cells", lambda: sequence_counts(np.zeros((1, 9), np.int32), 32)),
    ],
)
def test_bad_arguments_are_named(error, match, call):
    with pytest.raises(error, match=match):
        call()
