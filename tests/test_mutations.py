"""Mutation test: single-line faults planted in the package, in memory, each of which a named test must find.

`MUTATIONS` is the table: what is wrong, where, the line before and after, and the kill function (`tests.kills`,
`tests.kills_batch`) that must pass on the package as it is and fail with an AssertionError on the mutant. A piece of
code that is not found exactly once fails the test: the table has to follow the code.

`EQUIVALENT` lists faults that change nothing a law or a count could show, with the reason; they must survive, which
shows that a kill is not just a private copy of the package breaking:

* acceptance not capped at 1: a draw with probability above 1 passes as surely as one with 1;
* a bonus also where a draft was rejected (`has_bonus` without `~rejected`): that round adds a token anyway;
* residual and bonus noise of one purpose: they share keys, but a position draws one of the two at most;
* the row of the residual not held inside the block: it points outside only where nothing was rejected.

Not in the table: survival without its running minimum. Where a device multiplies in order, as CPUs do, products of
probabilities never increase in floats; the minimum is there for devices that associate otherwise.
"""

import functools
import sys
import time

import pytest

from specav import verification
from tests import kills, kills_batch
from tests.mutations import ROOT, Mutation, library, mutated_source

KILLS = {function.__name__: function for function in (*kills.KILLS, *kills_batch.KILLS)}
SECONDS = 10.0  # processor time of any kill

MUTATIONS = [
    # The tested positions.
    Mutation(
        "one draft more is tested than the rule says",
        "verification",
        "passed & (columns < num_tested[:, None])",
        "passed & (columns <= num_tested[:, None])",
        "exact_law_of_verification",
    ),
    Mutation(
        "one draft fewer is tested than the rule says",
        "verification",
        "passed & (columns < num_tested[:, None])",
        "passed & (columns < num_tested[:, None] - 1)",
        "exact_law_of_verification",
    ),
    Mutation(
        "mask of the tested drafts forgotten",
        "verification",
        "passed = passed & (columns < num_tested[:, None])",
        "passed = passed & (columns < width)",
        "exact_law_of_verification",
    ),
    Mutation(
        "drafts behind a rejection count as accepted",
        "verification",
        "jnp.sum(jnp.cumprod(passed.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)",
        "jnp.sum(passed.astype(jnp.int32), axis=1, dtype=jnp.int32)",
        "exact_law_of_verification",
    ),
    Mutation(
        "drafts tested against the next target row",
        "verification",
        "token_probability(target_logits[:, : draft_tokens.shape[1]], draft_tokens)",
        "token_probability(target_logits[:, 1:], draft_tokens)",
        "exact_law_of_verification",
    ),
    Mutation(
        "acceptance is q / p",
        "verification",
        "jnp.minimum(p / jnp.where(q > 0, q, 1.0), 1.0)",
        "jnp.minimum(q / jnp.where(p > 0, p, 1.0), 1.0)",
        "exact_law_of_verification",
    ),
    Mutation(
        "free row forgotten",
        "labels",
        'return num_verified if rule == "standard" else jnp.minimum(num_verified + 1, num_drafts)',
        "return num_verified",
        "counts_and_padding",
    ),
    Mutation(
        "free row tests a draft that does not exist",
        "labels",
        "jnp.minimum(num_verified + 1, num_drafts)",
        "num_verified + 1",
        "exact_law_of_verification",
    ),
    # The token that the target adds.
    Mutation(
        "residual drawn where nothing was rejected",
        "verification",
        "rejected = num_accepted < num_tested",
        "rejected = num_accepted <= num_tested",
        "exact_law_of_verification",
    ),
    Mutation(
        "bonus drawn under a rejection",
        "verification",
        "jnp.where(rejected[:, None], _residual(draft_tokens, draft_logits, target_row, row), target_row)",
        "target_row",
        "exact_law_of_verification",
    ),
    Mutation(
        "bonus from a row that was not fed, behind the free row",
        "verification",
        "has_bonus = ~rejected & (num_tested == num_verified)",
        "has_bonus = ~rejected",
        "exact_law_of_verification",
    ),
    Mutation(
        "no bonus",
        "verification",
        "has_bonus = ~rejected & (num_tested == num_verified)",
        "has_bonus = ~rejected & (num_tested > num_verified)",
        "counts_and_padding",
    ),
    Mutation(
        "token added from the row before",
        "verification",
        "target_row = law(_take_row(target_logits, row))",
        "target_row = law(_take_row(target_logits, jnp.maximum(row - 1, 0)))",
        "exact_law_of_verification",
    ),
    Mutation(
        "token added from the row behind",
        "verification",
        "target_row = law(_take_row(target_logits, row))",
        "target_row = law(_take_row(target_logits, jnp.minimum(row + 1, width)))",
        "exact_law_of_verification",
    ),
    Mutation(
        "residual of q - p",
        "verification",
        "jnp.maximum(target_row - draft_row, 0.0)",
        "jnp.maximum(draft_row - target_row, 0.0)",
        "exact_law_of_verification",
    ),
    Mutation(
        "residual not cut at zero",
        "verification",
        "jnp.maximum(target_row - draft_row, 0.0)",
        "jnp.abs(target_row - draft_row)",
        "exact_law_of_verification",
    ),
    Mutation(
        "q of the wrong position in the residual",
        "verification",
        "draft_row = law(_take_row(draft_logits, jnp.minimum(row, last)))",
        "draft_row = law(_take_row(draft_logits, jnp.minimum(row + 1, last)))",
        "exact_law_of_verification",
    ),
    Mutation(
        "residual of a point mass forgets another token",
        "verification",
        "jnp.take_along_axis(draft_tokens, jnp.minimum(row, last)[:, None], axis=1)",
        "jnp.take_along_axis(draft_tokens, jnp.minimum(row + 1, last)[:, None], axis=1)",
        "exact_law_of_verification",
    ),
    Mutation(
        "vanished residual draws token 0",
        "verification",
        "return jnp.where(vanished, target_row, weights)",
        "return weights",
        "an_impossible_draft_leaves_the_target_law",
    ),
    Mutation(
        "residual not renormalised",
        "randomness",
        "jnp.where(total > 0, less / jnp.where(total > 0, total, 1.0), 0.0)",
        "jnp.where(total > 0, less, 0.0)",
        "draws_follow_the_weights",
    ),
    # Padding and counts.
    Mutation(
        "padding of the emitted tokens forgotten",
        "verification",
        "tokens = jnp.where(slots < num_emitted[:, None], tokens, -1)",
        "tokens = jnp.where(slots <= num_emitted[:, None], tokens, -1)",
        "counts_and_padding",
    ),
    Mutation(
        "num_verified not held to num_drafts",
        "verification",
        "num_verified = jnp.clip(num_verified, 0, num_drafts)",
        "num_verified = jnp.clip(num_verified, 0, width)",
        "counts_out_of_range_are_clamped",
    ),
    Mutation(
        "num_drafts not held to K",
        "verification",
        '"num_drafts", num_drafts, "B", "int").astype(jnp.int32), 0, width)',
        '"num_drafts", num_drafts, "B", "int").astype(jnp.int32), 0, width + 1)',
        "counts_out_of_range_are_clamped",
    ),
    # Noise.
    Mutation(
        "drafts keyed by position alone",
        "randomness",
        "_fold(_fold(_fold(keys, jnp.full_like(positions, DRAFT)), positions), num_committed)",
        "_fold(_fold(keys, jnp.full_like(positions, DRAFT)), positions)",
        "drafts_are_not_drawn_twice",
    ),
    Mutation(
        "the loop keys drafts by position alone",
        "decode",
        "keys = randomness.draft_keys(draw_keys, position, state.positions)",
        "keys = randomness.draft_keys(draw_keys, position, position)",
        "drafts_are_not_drawn_twice",
    ),
    Mutation(
        "residual with the noise of the test",
        "verification",
        "jnp.where(rejected, randomness.RESIDUAL, randomness.BONUS)",
        "jnp.where(rejected, randomness.ACCEPT, randomness.BONUS)",
        "noise_belongs_to_the_token",
    ),
    Mutation(
        "purpose left out of the keys",
        "randomness",
        "_fold(_fold(keys, jnp.broadcast_to(jnp.asarray(purpose, positions.dtype), positions.shape)), positions)",
        "_fold(keys, positions)",
        "noise_belongs_to_the_token",
    ),
    Mutation(
        "tests keyed by column",
        "verification",
        "absolute = positions[:, None] + columns",
        "absolute = 0 * positions[:, None] + columns",
        "deferred_is_bitwise",
    ),
    Mutation(
        "added token keyed by the block",
        "verification",
        "randomness.verdict_keys(keys, positions + row, purpose)",
        "randomness.verdict_keys(keys, positions, purpose)",
        "deferred_is_bitwise",
    ),
    Mutation(
        "requests share their noise",
        "randomness",
        "jax.random.fold_in(key, row)",
        "jax.random.fold_in(key, 0 * row)",
        "noise_belongs_to_the_token",
    ),
    Mutation(
        "smaller half entered with the share of the left one",
        "randomness",
        "less = jnp.where(right_is_less, right, left)",
        "less = left",
        "draws_follow_the_weights",
    ),
    Mutation(
        "probability zero accepted now and then",
        "randomness",
        "(bits[1] < low)",
        "(bits[1] <= low)",
        "draws_follow_the_weights",
    ),
    # Deferral.
    Mutation(
        "kept drafts shifted one too far",
        "verification",
        "source = jnp.minimum(columns + num_tested[:, None], width - 1)",
        "source = jnp.minimum(columns + num_tested[:, None] + 1, width - 1)",
        "deferred_is_bitwise",
    ),
    Mutation(
        "laws of kept drafts not moved: q of the wrong position",
        "verification",
        "logits=None if block.logits is None else shift(block.logits)",
        "logits=block.logits",
        "deferred_is_bitwise",
    ),
    Mutation(
        "drafts kept after a rejection",
        "verification",
        "kept = jnp.where(num_accepted == num_tested, num_drafts - num_tested, 0)",
        "kept = num_drafts - num_tested",
        "carried_drafts_are_the_untested_ones",
    ),
    Mutation(
        "origins not moved",
        "verification",
        "origin=shift(block.origin)",
        "origin=block.origin",
        "carried_drafts_are_the_untested_ones",
    ),
    # Labels and survival.
    Mutation(
        "first rejection not observed",
        "labels",
        "num_observed = jnp.minimum(num_accepted + 1, num_tested)",
        "num_observed = jnp.minimum(num_accepted, num_tested)",
        "labels_equal_a_walk",
    ),
    Mutation(
        "everything tested is observed, also behind a rejection",
        "labels",
        "num_observed = jnp.minimum(num_accepted + 1, num_tested)",
        "num_observed = num_tested",
        "labels_equal_a_walk",
    ),
    Mutation(
        "survival not held to 1",
        "survival",
        "jnp.where(acceptance > 0, jnp.minimum(acceptance, 1.0), 0.0)",
        "jnp.where(acceptance > 0, acceptance, 0.0)",
        "survival_is_a_monotone_product",
    ),
    Mutation(
        "survival in empty slots",
        "survival",
        'jnp.where(valid_slots(num_drafts, dims["K"]), jax.lax.cummin(product, axis=1), 0.0)',
        "jax.lax.cummin(product, axis=1)",
        "survival_is_a_monotone_product",
    ),
    # The trimmer.
    Mutation(
        "ties by later slot first",
        "trimmer",
        "number = jnp.arange(width, dtype=jnp.int32)[None, :] * batch",
        "number = (width - 1 - jnp.arange(width, dtype=jnp.int32))[None, :] * batch",
        "allocation_equals_brute_force",
    ),
    Mutation(
        "ties by request first",
        "trimmer",
        "* batch + jnp.arange(batch, dtype=jnp.int32)[:, None]",
        "+ jnp.arange(batch, dtype=jnp.int32)[:, None] * width",
        "allocation_equals_brute_force",
    ),
    Mutation(
        "pairwise: ties to the later request",
        "trimmer",
        "wins_tie = earlier_column | ((other_column == column) & (other_row < row))",
        "wins_tie = earlier_column | ((other_column == column) & (other_row > row))",
        "allocation_equals_brute_force",
    ),
    Mutation(
        "budget off by one",
        "trimmer",
        "(number <= last_number)",
        "(number < last_number)",
        "allocation_equals_brute_force",
    ),
    Mutation(
        "a budget of nothing takes one slot",
        "trimmer",
        "return taken & valid & (budget > 0)",
        "return taken & valid",
        "allocation_equals_brute_force",
    ),
    Mutation(
        "mask of num_drafts forgotten in the order",
        "trimmer",
        "rank = jnp.where(valid, ~order, jnp.iinfo(order.dtype).max)",
        "rank = ~order",
        "allocation_equals_brute_force",
    ),
    Mutation(
        "pairwise: invalid slots counted",
        "trimmer",
        "jnp.sum(before & valid[None, None, :, :], axis=(2, 3), dtype=jnp.int32)",
        "jnp.sum(before, axis=(2, 3), dtype=jnp.int32)",
        "allocation_equals_brute_force",
    ),
    Mutation(
        "a rising score lets a later slot in first",
        "trimmer",
        "order = jax.lax.cummin(_ordered_bits(survival), axis=1)",
        "order = _ordered_bits(survival)",
        "allocation_equals_brute_force",
    ),
    Mutation(
        "sampling term dropped",
        "trimmer",
        "rate = (sampling.astype(jnp.float32) + gain)",
        "rate = (0 * sampling.astype(jnp.float32) + gain)",
        "budget_equals_exhaustive_search",
    ),
    Mutation(
        "base tokens dropped",
        "trimmer",
        "verify_cost(costs, base + budgets)",
        "verify_cost(costs, budgets)",
        "budget_equals_exhaustive_search",
    ),
    Mutation(
        "invalid slots add to the gain",
        "trimmer",
        "value = jnp.where(valid & (survival > 0), jnp.minimum(survival, 1.0), 0.0)",
        "value = jnp.where(survival > 0, jnp.minimum(survival, 1.0), 0.0)",
        "budget_equals_exhaustive_search",
    ),
    Mutation(
        "early stop at a gain",
        "trimmer",
        "jnp.argmax(following <= rate)",
        "jnp.argmax(following < rate)",
        "budget_equals_exhaustive_search",
    ),
    Mutation(
        "budget from this round",
        "policies.trimming",
        "return Admission(survival, state.budget), TrimmerState(",
        "return Admission(survival, choose_budget(survival, num_drafts, costs, **counts)), TrimmerState(",
        "budget_is_predictable",
    ),
    Mutation(
        "finished requests are verified",
        "policies.base",
        '"inputs.active", inputs.active, "B", "bool"), num_drafts, 0)',
        '"inputs.active", inputs.active, "B", "bool"), num_drafts, num_drafts)',
        "budget_is_predictable",
    ),
    # The loop.
    Mutation(
        "num_drafts lowered by a p_min that reads the draw",
        "decode",
        "num_drafts = num_kept + num_new",
        "num_drafts = num_kept + jnp.where("
        "jnp.take_along_axis(jax.nn.softmax(raw[:, 0]), new_tokens[:, :1], axis=1)[:, 0] < 0.5, 0, num_new)",
        "sequences_of_the_coupled_rule",
    ),
    Mutation(
        "a kept draft evicted by a rule that reads the draw",
        "decode",
        "jnp.where(finished, 0, kept.num_drafts)",
        "jnp.where(finished | (kept.tokens[:, 0] == 1), 0, kept.num_drafts)",
        "sequences_of_the_deferred_rule",
    ),
    Mutation(
        "the row behind the last verified draft is not fed",
        "decode",
        "num_fed = jnp.where(active, num_verified + 1, 0)",
        "num_fed = jnp.where(active, num_verified, 0)",
        "sequences_of_the_standard_rule",
    ),
    Mutation(
        "owed bonus forgotten",
        "decode",
        "jnp.where((num_kept > 0) | state.owes_bonus, num_kept, wanted)",
        "jnp.where(num_kept > 0, num_kept, wanted)",
        "deferred_loop_is_bitwise",
    ),
    Mutation(
        "labels behind the end of a request",
        "decode",
        "verification_labels(result.num_accepted, result.num_tested, width, num_labelled=num_committed)",
        "verification_labels(result.num_accepted, result.num_tested, width)",
        "labels_stop_at_the_end",
    ),
]

EQUIVALENT = [
    Mutation(
        "acceptance not capped at 1",
        "verification",
        "jnp.where(q > 0, jnp.minimum(p / jnp.where(q > 0, q, 1.0), 1.0), 0.0)",
        "jnp.where(q > 0, p / jnp.where(q > 0, q, 1.0), 0.0)",
        "exact_law_of_verification",
    ),
    Mutation(
        "a bonus also where a draft was rejected",
        "verification",
        "has_bonus = ~rejected & (num_tested == num_verified)",
        "has_bonus = num_tested == num_verified",
        "exact_law_of_verification",
    ),
    Mutation(
        "residual and bonus noise of one purpose",
        "verification",
        "jnp.where(rejected, randomness.RESIDUAL, randomness.BONUS)",
        "jnp.full_like(row, randomness.BONUS)",
        "sequences_of_the_standard_rule",
    ),
    Mutation(
        "row of the residual not held inside the block",
        "verification",
        "law(_take_row(draft_logits, jnp.minimum(row, last)))",
        "law(_take_row(draft_logits, row))",
        "exact_law_of_verification",
    ),
]

names = functools.partial(map, lambda mutation: mutation.name)


def kill(name, mutation=None):
    """Runs a kill function on a private copy; returns its failure, or None."""
    before = time.process_time()
    with library(mutation) as lib:
        try:
            KILLS[name](lib)
            failure = None
        except AssertionError as error:
            failure = error
        assert mutation is None or lib.has_the_fault
    assert time.process_time() - before < SECONDS
    return failure


@functools.cache
def passes_unmutated(name):
    failure = kill(name)
    if failure is not None:
        raise failure
    return True


@pytest.mark.parametrize("name", KILLS)
def test_the_package_passes(name):
    assert passes_unmutated(name)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=names(MUTATIONS))
def test_the_mutant_is_killed(mutation):
    assert passes_unmutated(mutation.killed_by)
    assert kill(mutation.killed_by, mutation) is not None, "the mutant survives"


@pytest.mark.parametrize("mutation", EQUIVALENT, ids=names(EQUIVALENT))
def test_an_equivalent_mutant_survives(mutation):
    assert kill(mutation.killed_by, mutation) is None


def test_the_table_is_sound():
    """At least 15 faults of different names; every kill function kills something."""
    assert len(MUTATIONS) >= 15 and len({*names(MUTATIONS)}) == len(MUTATIONS)
    assert {mutation.killed_by for mutation in MUTATIONS} == {*KILLS}


@pytest.mark.parametrize("old", ["no such line", "num_drafts"])
def test_a_table_that_does_not_fit_the_code_fails_loudly(old):
    with pytest.raises(LookupError, match="expected once"):
        mutated_source(Mutation("stale", "verification", old, "pass", "counts_and_padding"))


def test_nothing_of_a_mutant_stays_behind():
    mutation, path = MUTATIONS[0], ROOT / "verification.py"
    source, modules = path.read_bytes(), {n: m for n, m in sys.modules.items() if n.startswith("specav")}
    with library(mutation) as lib:
        assert lib.verification is not verification and lib.has_the_fault
        assert lib.verification.randomness is lib.randomness
    assert {n: m for n, m in sys.modules.items() if n.startswith("specav")} == modules
    assert sys.modules["specav.verification"] is verification and path.read_bytes() == source
    assert not any(type(finder).__module__ == "tests.mutations" for finder in sys.meta_path)
