"""Labels and censoring."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specav.labels import num_tested_drafts, verification_labels
from tests.helpers import assert_stays_on_device

RULES = ("standard", "coupled", "deferred")


def simulate(rule, verdicts, num_drafts, num_verified):
    """Walks through one request's tests in plain Python: (accepted, observed, num_accepted) as lists."""
    rows = num_verified if rule == "standard" else num_verified + 1
    accepted, observed = [False] * len(verdicts), [False] * len(verdicts)
    for i in range(min(rows, num_drafts)):
        observed[i] = True
        accepted[i] = verdicts[i]
        if not verdicts[i]:
            break
    return accepted, observed, sum(accepted)


@given(st.data())
def test_labels_equal_a_walk_through_the_tests(data):
    width = data.draw(st.integers(1, 5))
    batch = data.draw(st.integers(1, 4))
    rule = data.draw(st.sampled_from(RULES))
    drafts = data.draw(st.lists(st.integers(0, width), min_size=batch, max_size=batch))
    verified = [data.draw(st.integers(0, n)) for n in drafts]
    verdicts = [data.draw(st.lists(st.booleans(), min_size=width, max_size=width)) for _ in range(batch)]
    walks = [simulate(rule, v, d, n) for v, d, n in zip(verdicts, drafts, verified, strict=True)]
    tested = num_tested_drafts(jnp.array(verified), jnp.array(drafts), rule)
    labels = verification_labels(jnp.array([w[2] for w in walks]), tested, width)
    np.testing.assert_array_equal(labels.observed, [w[1] for w in walks])
    np.testing.assert_array_equal(labels.accepted & labels.observed, [w[0] for w in walks])


def test_worked_example():
    # All tests passed; the second failed; nothing tested (an empty slot); all of two drafts passed.
    labels = verification_labels(jnp.array([3, 1, 0, 2]), jnp.array([3, 3, 0, 2]), 3)
    np.testing.assert_array_equal(labels.accepted, [[1, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 0]])
    np.testing.assert_array_equal(labels.observed, [[1, 1, 1], [1, 1, 0], [0, 0, 0], [1, 1, 0]])


def test_the_free_row_grades_one_draft_more():
    verified, drafts = jnp.array([0, 2, 4, 0]), jnp.array([4, 4, 4, 0])
    np.testing.assert_array_equal(num_tested_drafts(verified, drafts, "standard"), [0, 2, 4, 0])
    np.testing.assert_array_equal(num_tested_drafts(verified, drafts, "coupled"), [1, 3, 4, 0])
    np.testing.assert_array_equal(num_tested_drafts(verified, drafts, "deferred"), [1, 3, 4, 0])


def test_labels_beyond_the_end_of_a_request_are_ignored():
    labels = verification_labels(jnp.array([4, 4, 4]), jnp.array([4, 4, 4]), 4, num_labelled=jnp.array([2, 0, -3]))
    np.testing.assert_array_equal(labels.observed, [[1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]])


def test_counts_out_of_range_are_clamped():
    np.testing.assert_array_equal(
        num_tested_drafts(jnp.array([9, -2, 1]), jnp.array([3, 3, -1]), "standard"), [3, 0, 0]
    )
    labels = verification_labels(jnp.array([9, -4, 2]), jnp.array([9, 2, -1]), 3)
    np.testing.assert_array_equal(labels.accepted, [[1, 1, 1], [0, 0, 0], [0, 0, 0]])
    np.testing.assert_array_equal(labels.observed, [[1, 1, 1], [1, 0, 0], [0, 0, 0]])


def test_jit_vmap_and_no_host_transfer():
    accepted, tested = jnp.array([[1, 0], [2, 1]]), jnp.array([[2, 0], [2, 2]])
    function = lambda a, t: verification_labels(a, t, 2)  # noqa: E731
    mapped = jax.jit(jax.vmap(function))(accepted, tested)
    for i in range(2):
        for one, other in zip(function(accepted[i], tested[i]), mapped, strict=True):
            np.testing.assert_array_equal(one, other[i])
    assert_stays_on_device(function, accepted[0], tested[0])


@pytest.mark.usefixtures("own_checks")
def test_errors_say_what_was_expected():
    counts = jnp.array([1, 2])
    with pytest.raises(ValueError, match=r"num_tested: expected shape \[B=2\], got \[3\]"):
        verification_labels(counts, jnp.array([1, 2, 3]), 3)
    with pytest.raises(TypeError, match="num_accepted: expected an integer dtype, got float32"):
        verification_labels(counts.astype(jnp.float32), counts, 3)
    with pytest.raises(ValueError, match="num_positions: expected an int of at least 1, got 0"):
        verification_labels(counts, counts, 0)
    with pytest.raises(ValueError, match="rule: expected one of 'standard', 'coupled', 'deferred', got 'eager'"):
        num_tested_drafts(counts, counts, "eager")
