"""Anticipation: leaks are found in every seed, exact policies are never accused, and witnesses hold on their own."""

import functools
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specav import policies
from specav.features import FEATURES
from specav.lossless._scenarios import PROPOSALS, draw, policy_inputs, possible_blocks, random_scenarios
from specav.lossless.anticipation import check_non_anticipating
from specav.lossless.catalogue import CATALOGUE, rising_costs, stair_costs
from specav.lossless.scheme import Scheme, processed, sampled_with
from specav.policies import Policy
from specav.sampling import SamplingParams
from specav.survival import valid_slots

B, K = 6, 4
SEEDS = range(20)


def check(policy, rule, **options):
    return check_non_anticipating(policy, rule=rule, **{"num_requests": B, "num_draft_tokens": K} | options)


# Leaks as a user may write them. Declarations are false on purpose: the check must not believe them.


def user(decide, init=lambda: ()):
    """A policy of the user that claims to read nothing of this round."""
    return Policy(init, decide, decide.__name__, "past", (), "none")


def all_or_nothing(inputs, yes):
    return jnp.where(yes, inputs.num_drafts, 0)


def third_token_decides(state, inputs):
    return all_or_nothing(inputs, inputs.draft_tokens[:, 2] != 3), state


def next_law_decides(state, inputs):
    """The entropy of position 2 decides about position 1: revealed by the free row under the coupled rule."""
    return all_or_nothing(inputs, inputs.features.entropy[:, 1] < 1.0), state


def next_draw_decides(state, inputs):
    return all_or_nothing(inputs, inputs.features.logit_q_sampled[:, 1] > 0), state


def three_of_a_kind(state, inputs):
    """Rare: one block in hundreds, under uniform laws."""
    tokens = inputs.draft_tokens
    rare = (tokens[:, 1] == 5) & (tokens[:, 2] == 5) & (tokens[:, 3] == 5)
    return jnp.minimum(jnp.where(rare, 0, 1), inputs.num_drafts), state


def ties_to_the_later_slot(state, inputs):
    """Ranks equal survival by the later position: it takes a tie with a later slot to see it."""
    valid = valid_slots(inputs.num_drafts, K)
    score = jnp.where(valid, inputs.survival, -1.0).reshape(-1)
    number = jnp.arange(score.shape[0], dtype=jnp.int32).reshape(K, -1).T.reshape(-1)  # by (position, request)
    before = (score[None, :] > score[:, None]) | ((score[None, :] == score[:, None]) & (number[None] > number[:, None]))
    taken = jnp.sum(before, axis=1, dtype=jnp.int32) < 5
    return jnp.sum(taken.reshape(valid.shape) & valid, axis=1, dtype=jnp.int32), state


def law_after_the_last_draft(state, inputs):
    """Reads a row that no draft has, but the drafter computed."""
    after = jnp.minimum(inputs.num_drafts, K - 1)[:, None]
    entropy = jnp.take_along_axis(inputs.features.entropy, after, axis=1)[:, 0]
    return all_or_nothing(inputs, entropy < 1.0), state


def after_four_rounds(state, inputs):
    looks = (state >= 4) & (inputs.draft_tokens[:, 0] == 2)
    return jnp.where(looks, 0, jnp.minimum(inputs.num_drafts, 1)), state + 1


def after_a_clean_sweep(state, inputs):
    """Looks at x_1 only where the last round tested several drafts and accepted all."""
    swept = (inputs.last_accepted == inputs.last_tested) & (inputs.last_tested >= 2)
    return all_or_nothing(inputs, ~swept | (inputs.draft_tokens[:, 1] < 4)), state


def sum_of_tokens(state, inputs):
    return all_or_nothing(inputs, jnp.sum(jnp.maximum(inputs.draft_tokens, 0), axis=1) % 2 == 0), state


def neighbour_decides(state, inputs):
    """Verified iff the next request drew an even token: own laws exact, joint law bent."""
    return all_or_nothing(inputs, jnp.roll(inputs.draft_tokens[:, 0], 1) % 2 == 0), state


def neighbours_law_decides(state, inputs):
    """A threshold from the law of the next request's second draft."""
    bound = jnp.roll(inputs.features.logit_q_max[:, 1], 1)
    return all_or_nothing(inputs, inputs.features.logit_q_max[:, 0] > bound), state


def counter():
    return jnp.zeros((), jnp.int32)


BOTH, STANDARD = ("standard", "coupled"), ("standard",)
LEAKS = {
    "third token": (user(third_token_decides), BOTH, "prefix"),
    "next law": (user(next_law_decides), STANDARD, "prefix"),
    "next draw": (user(next_draw_decides), BOTH, "prefix"),
    "three of a kind": (user(three_of_a_kind), BOTH, "prefix"),
    "ties": (user(ties_to_the_later_slot), BOTH, "prefix"),
    "law after the last draft": (user(law_after_the_last_draft), BOTH, "prefix"),
    "after four rounds": (user(after_four_rounds, counter), STANDARD, "prefix"),
    "after a clean sweep": (user(after_a_clean_sweep), BOTH, "prefix"),
    "sum of tokens": (user(sum_of_tokens), BOTH, "prefix"),
    "drawn acceptance": (policies.threshold("acceptance", 0.5), STANDARD, "draw"),
}
JOINT_LEAKS = {
    # The free row reveals every request's first draft and second law.
    "neighbour": (user(neighbour_decides), STANDARD),
    "neighbour's law": (user(neighbours_law_decides), STANDARD),
}
EXACT = {
    "drawn acceptance": (policies.threshold("acceptance", 0.5), ("coupled",), "draw"),
    "acceptance": (policies.threshold("acceptance", 0.5), BOTH, "prefix"),
    "survival": (policies.survival_threshold(0.3), BOTH, "prefix"),
    "next law": (user(next_law_decides), ("coupled",), "prefix"),
    "neighbour": (user(neighbour_decides), ("coupled",), "prefix"),
    "neighbour's law": (user(neighbours_law_decides), ("coupled",), "prefix"),
    "after four rounds": (user(after_four_rounds, counter), ("coupled",), "prefix"),
    "pairwise trimmer": (policies.trimmer(rising_costs(B, K), initial_budget=7, method="pairwise"), BOTH, "prefix"),
}


def cases(table):
    return [pytest.param(name, rule, id=f"{name}, {rule}") for name, entry in table.items() for rule in entry[1]]


@pytest.mark.parametrize(("name", "rule"), cases(LEAKS))
def test_leaks_of_users_are_found_in_every_seed(name, rule):
    policy, _, depends_on = LEAKS[name]
    for seed in SEEDS[:8]:
        finding = check(policy, rule, acceptance_depends_on=depends_on, seed=seed)
        assert finding.marginal is not None and finding.joint is not None, (seed, str(finding))
        assert not finding.passed
        for witness in (finding.marginal, finding.joint):
            assert_holds(witness, policy, rule, depends_on)
        # A marginal witness changes drafts of its own request only.
        assert {change.request for change in finding.marginal.changed} == {finding.marginal.request}


@pytest.mark.parametrize(("name", "rule"), cases(JOINT_LEAKS))
def test_leaks_across_requests_are_told_apart(name, rule):
    policy, _ = JOINT_LEAKS[name]
    for seed in SEEDS[:8]:
        finding = check(policy, rule, seed=seed, num_scenarios=64)
        assert finding.marginal is None, str(finding)
        assert finding.joint is not None, (seed, str(finding))
        assert_holds(finding.joint, policy, rule, "prefix")
        assert finding.joint.request not in {change.request for change in finding.joint.changed}
    text = str(finding)
    assert "each request's own law: no counterexample in" in text
    assert f"joint law of the batch: not safe, verifying request {finding.joint.request} position" in text


@pytest.mark.parametrize(("name", "rule"), cases(EXACT))
def test_exact_policies_are_not_accused(name, rule):
    policy, _, depends_on = EXACT[name]
    for seed in range(2):
        finding = check(policy, rule, acceptance_depends_on=depends_on, seed=seed, num_scenarios=320)
        assert finding.passed, str(finding)
        assert finding.num_checks == 2 * 12 * 320


@functools.cache
def decider(policy):
    return jax.jit(lambda state, inputs: policy.decide(state, inputs)[0])


def assert_holds(witness, policy, rule, depends_on):
    """The policy decides as stated on both inputs, and they agree in all that the decision reveals."""
    before = np.asarray(decider(policy)(witness.state, witness.inputs_before))
    after = np.asarray(decider(policy)(witness.state, witness.inputs_after))
    assert before[witness.request] == witness.before and after[witness.request] == witness.after
    assert witness.before != witness.after and witness.changed
    low, high = sorted((witness.before, witness.after))
    assert witness.positions == tuple(range(low + 1, high + 1))
    a, b = witness.inputs_before, witness.inputs_after
    for name in ("num_drafts", "active", "num_base_tokens", "num_sampling", "last_accepted", "last_tested"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))

    column = np.arange(a.draft_tokens.shape[1])
    revealed = np.minimum(before + (rule == "coupled"), np.asarray(a.num_drafts))[:, None]
    drawn_known, law_known = column < revealed, column <= revealed
    draws = {"draft_tokens": (a.draft_tokens, b.draft_tokens)}
    laws = {}
    for name, spec in FEATURES.items():
        pair = getattr(a.features, name), getattr(b.features, name)
        (draws if spec.depends_on == "draw" else laws)[name] = pair
    (draws if depends_on == "draw" else laws)["acceptance"] = (a.acceptance, b.acceptance)
    (draws if depends_on == "draw" else laws)["survival"] = (a.survival, b.survival)
    for known, pairs in ((drawn_known, draws), (law_known, laws)):
        for x, y in pairs.values():
            np.testing.assert_array_equal(np.asarray(x)[known], np.asarray(y)[known])
    # What is listed is what differs.
    listed = [(change.request, change.position - 1) for change in witness.changed]
    assert listed == list(map(tuple, np.argwhere(np.asarray(a.draft_tokens != b.draft_tokens))))
    for change in witness.changed:
        assert a.draft_tokens[change.request, change.position - 1] == change.before
        assert b.draft_tokens[change.request, change.position - 1] == change.after


def rounds(exact, marginal):
    """Scenarios: few where a search goes on to the end, for it finds nothing, or nothing marginal."""
    return 256 if exact else 96 if marginal else None


@pytest.mark.parametrize("practice", CATALOGUE, ids=lambda practice: practice.name)
def test_the_catalogue_agrees_with_its_declarations(practice):
    """What a policy of the library declares and what the search finds: two independent views, in 20 of 20 seeds."""
    policy = practice.policy(B, K)
    depends_on = practice.acceptance_depends_on
    declared = policies.verdict(policy, acceptance_depends_on=depends_on, drafter=practice.scheme.drafter)
    for rule in BOTH:
        marginal, joint = rule in declared.marginal, rule in declared.joint
        options = {"drafter": practice.scheme, "acceptance_depends_on": depends_on}
        for seed in SEEDS[:1] if joint else SEEDS:
            finding = check(policy, rule, seed=seed, num_scenarios=rounds(joint, marginal), **options)
            assert (finding.marginal is None) == marginal, (seed, str(finding))
            assert (finding.joint is None) == joint, (seed, str(finding))
            for witness in (finding.marginal, finding.joint):
                if witness is not None:
                    assert_holds(witness, policy, rule, depends_on)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("threshold on drawn q, discarding", "standard"),
        ("live argmax, max q", "coupled"),
        ("n_min clearing", "coupled"),
    ],
)
def test_production_shapes(name, rule):
    (practice,) = (practice for practice in CATALOGUE if practice.name == name)
    policy = practice.policy(64, 8)
    finding = check_non_anticipating(policy, rule=rule)
    assert finding.marginal is not None and finding.joint is not None, str(finding)
    assert (finding.num_requests, finding.num_draft_tokens) == (64, 8)
    assert finding.marginal.inputs_before.draft_tokens.shape == (64, 8)
    assert len(finding.marginal.changed) <= 3
    assert_holds(finding.marginal, policy, rule, "prefix")


def test_production_shapes_take_less_than_half_a_minute():
    start = time.process_time()  # of this process: others may share the machine
    finding = check_non_anticipating(policies.trimmer(rising_costs(64, 8)), rule="standard")
    assert finding.passed, str(finding)
    assert time.process_time() - start < 30


@pytest.mark.slow
@pytest.mark.parametrize("practice", CATALOGUE, ids=lambda practice: practice.name)
def test_every_leak_of_the_catalogue_is_found_at_production_shapes(practice):
    policy = practice.policy(64, 8)
    depends_on = practice.acceptance_depends_on
    declared = policies.verdict(policy, acceptance_depends_on=depends_on, drafter=practice.scheme.drafter)
    for rule in BOTH:
        marginal, joint = rule in declared.marginal, rule in declared.joint
        options = {"drafter": practice.scheme, "acceptance_depends_on": depends_on}
        for seed in SEEDS[:2] if joint else SEEDS:
            number = None if joint else rounds(joint, marginal)
            finding = check_non_anticipating(policy, rule=rule, seed=seed, num_scenarios=number, **options)
            assert (finding.marginal is None) == marginal, (seed, str(finding))
            assert (finding.joint is None) == joint, (seed, str(finding))


@pytest.mark.parametrize("rule", BOTH)
def test_parallel_drafters_may_look_at_all_laws(rule):
    """With every law known before any draw, block policies on prefix features are exact; draws stay secret."""
    for policy in (
        policies.mean_threshold("logit_q_max", 1.0),
        policies.mean_threshold("logit_q_max", 1.0, over="batch"),
        policies.live_argmax(stair_costs(B, K)),
        user(next_law_decides),
    ):
        assert check(policy, rule, drafter="parallel", num_scenarios=128).passed
    finding = check(user(next_draw_decides), rule, drafter="parallel")
    assert finding.marginal is not None and finding.joint is not None
    assert_holds(finding.marginal, user(next_draw_decides), rule, "prefix")
    assert "draft law" not in finding.marginal.explanation
    a, b = finding.marginal.inputs_before, finding.marginal.inputs_after
    np.testing.assert_array_equal(a.features.entropy, b.features.entropy)


def test_where_anything_goes_nothing_is_searched():
    leak = user(third_token_decides)
    deferred = check(leak, "deferred")
    assert deferred.passed and deferred.num_checks == 0
    assert "nothing to check, any decision is exact (every draft is tested sooner or later)" in str(deferred)
    greedy = check(leak, "standard", drafter="point_mass")
    assert greedy.passed and greedy.num_checks == 0 and "(drafts are not random)" in str(greedy)


def test_a_faulty_scheme_is_reported_apart_from_the_policy():
    scheme = Scheme(drawn=sampled_with(SamplingParams(top_k=2)), tested=processed, name="top-k on one side")
    finding = check(policies.fixed(2), "standard", drafter=scheme, num_scenarios=64)
    assert finding.marginal is None and finding.joint is None and not finding.passed
    assert finding.scheme is not None and "scheme: top-k on one side: " in str(finding)
    # The laws of the drafts are the drawn ones: two tokens, or more if they tie.
    leak = check(user(next_draw_decides), "coupled", drafter=scheme)
    assert leak.marginal is not None and leak.scheme is not None
    deferred = check(policies.fixed(2), "deferred", drafter=scheme)
    assert not deferred.passed and deferred.scheme is not None


def test_explanations_say_who_what_and_why():
    """x_3 decides whether anything is verified; under the standard rule with nothing verified nothing is known."""
    witness = check(user(third_token_decides), "standard").marginal
    (change,) = witness.changed
    assert change.position == 3 and 3 in (change.before, change.after)
    direction = "from no to yes" if witness.after else "from yes to no"
    number = max(witness.before, witness.after)
    known = {0: "none of its drafts", 1: "its draft 1 only"}.get(
        witness.before, f"its drafts 1 to {witness.before} only"
    )
    assert str(witness) == witness.explanation
    assert witness.explanation == (
        f"verifying request {witness.request} positions 1 to {number} changed {direction} when draft token 3 of "
        f"request {witness.request} changed from {change.before} to {change.after}, and with it the draft law of "
        f"position 4; the standard rule reveals of request {witness.request} {known}"
    )
    joint = check(user(neighbour_decides), "standard", num_scenarios=96).joint
    neighbour = (joint.request - 1) % B
    assert [(c.request, c.position) for c in joint.changed] == [(neighbour, 1)]
    assert re.search(
        rf"verifying request {joint.request} position.* when draft token 1 of request {neighbour} changed .*"
        rf"the standard rule reveals of request {neighbour} none of its drafts",
        joint.explanation,
    )


def test_a_finding_is_reproducible_and_depends_on_the_seed():
    leak = user(sum_of_tokens)
    first, again, other = (check(leak, "standard", seed=seed) for seed in (3, 3, 4))
    assert str(first) == str(again) != str(other)


def test_the_search_starts_from_a_given_state():
    """A leak that opens after a hundred rounds only."""

    def decide(state, inputs):
        return all_or_nothing(inputs, (state < 100) | (inputs.draft_tokens[:, 1] < 4)), state + 1

    late = user(decide, counter)
    assert check(late, "standard", num_scenarios=320).passed
    finding = check(late, "standard", num_scenarios=320, state=jnp.full((), 100, jnp.int32))
    assert finding.marginal is not None and finding.marginal.state >= 100


@pytest.mark.parametrize("shape", [(1, 1, 2), (1, 3, 5), (3, 1, 4)])
def test_small_shapes(shape):
    batch, width, vocabulary = shape
    sizes = {"num_requests": batch, "num_draft_tokens": width, "vocabulary": vocabulary}
    leak = policies.threshold("logit_q_sampled", 0.0)
    assert check(leak, "standard", num_scenarios=320, **sizes).marginal is not None
    assert check(leak, "coupled", num_scenarios=320, **sizes).passed


@pytest.mark.parametrize("depends_on", ["prefix", "draw"])
@pytest.mark.parametrize("kind", ["autoregressive", "parallel"])
def test_redraws_leave_the_revealed_part_alone(kind, depends_on):
    """Bit for bit, and every block drawn is possible."""
    rng, shape = np.random.default_rng(5), (16, B, K, 5)
    zeros = np.zeros((16, B), np.int32)
    scenarios = random_scenarios(rng, shape, Scheme(drafter=kind), depends_on, zeros, zeros)
    chains, every = np.arange(16), np.ones((16, B, K), bool)
    base = draw(rng, scenarios, chains, np.zeros((16, B, K), int), every, np.zeros((), int))
    length = scenarios.num_drafts[..., None]
    known = np.minimum(rng.integers(0, K + 1, (16, B, 1)), length)
    redrawn = (np.arange(K) >= known) & (np.arange(K) < length)
    a = policy_inputs(scenarios, chains, base)
    moved = np.zeros((16, B, K), bool)
    for proposal in range(PROPOSALS):
        blocks = draw(rng, scenarios, chains, base, redrawn, np.full((), proposal))
        assert possible_blocks(scenarios, chains, blocks).all()
        assert ((blocks >= 0) & (blocks < 5)).all()
        moved |= blocks != base
        np.testing.assert_array_equal(blocks[~redrawn], base[~redrawn])
        b = policy_inputs(scenarios, chains, blocks)
        law_known = np.ones((16, B, K), bool) if kind == "parallel" else np.arange(K) <= known
        for name, spec in FEATURES.items():
            same = law_known if spec.depends_on == "prefix" else np.arange(K) < known
            np.testing.assert_array_equal(getattr(a.features, name)[same], getattr(b.features, name)[same])
        same = law_known if depends_on == "prefix" else np.arange(K) < known
        np.testing.assert_array_equal(a.acceptance[same], b.acceptance[same])
    assert moved[redrawn].mean() > 0.5  # many tokens are certain
    # One proposal is the law itself.
    scenarios = scenarios._replace(num_drafts=np.full_like(scenarios.num_drafts, K))
    tokens = draw(
        rng, scenarios, np.zeros(4000, int), np.zeros((4000, B, K), int), np.ones((4000, B, K), bool), np.zeros((), int)
    )
    row = scenarios.row_of[0, 2, 0, 0]
    law = np.diff(scenarios.cumulative[0, 0, row], prepend=0)
    np.testing.assert_allclose(np.bincount(tokens[:, 2, 0], minlength=5) / 4000, law, atol=0.04)


def test_scenarios_are_varied():
    """Thresholds in use lie among the values; batches are full, ragged, nearly empty; predictions of all sizes."""
    rng, shape = np.random.default_rng(0), (64, 16, K, 8)
    zeros = np.zeros((64, 16), np.int32)
    scenarios = random_scenarios(rng, shape, Scheme(), "prefix", zeros, zeros)
    top, entropy = scenarios.features["logit_q_max"], scenarios.features["entropy"]
    for low, high in ((-2, 0), (0, 2), (2, 4), (4, 8), (39, 41)):
        assert ((top >= low) & (top <= high)).mean() > 0.01
    for low in (0, 0.5, 1.0, 1.5):
        assert ((entropy >= low) & (entropy <= low + 0.5)).mean() > 0.05
    assert {1, 2, 16} <= set((scenarios.num_drafts > 0).sum(axis=1))
    assert set(np.unique(scenarios.num_drafts)) == set(range(K + 1))
    assert not (scenarios.num_drafts[~scenarios.active] > 0).any()
    for low in (0, 0.25, 0.5, 0.75):
        assert ((scenarios.acceptance >= low) & (scenarios.acceptance <= low + 0.25)).mean() > 0.05


@pytest.mark.usefixtures("own_checks")
def test_errors():
    fine = policies.fixed(1)
    with pytest.raises(ValueError, match="rule: expected one of 'standard', 'coupled', 'deferred', got 'greedy'"):
        check(fine, "greedy")
    with pytest.raises(ValueError, match="drafter: expected one of 'autoregressive', 'parallel', 'point_mass'"):
        check(fine, "standard", drafter="tree")
    with pytest.raises(ValueError, match="acceptance_depends_on: expected one of 'prefix', 'draw', got 'past'"):
        check(fine, "standard", acceptance_depends_on="past")
    for name, least in (("num_requests", 1), ("num_draft_tokens", 1), ("vocabulary", 2), ("num_scenarios", 1)):
        with pytest.raises(ValueError, match=f"{name}: expected an int of at least {least}, got 0"):
            check(fine, "standard", **{name: 0})
        with pytest.raises(TypeError, match=f"{name}: expected a Python int"):
            check(fine, "standard", **{name: 2.0})
    with pytest.raises(ValueError, match="seed: expected an int of at least 0, got -1"):
        check(fine, "standard", seed=-1)
    with pytest.raises(ValueError, match=r"num_requests: expected 1 or B=6, got 3"):
        check(policies.draft_and_verify(num_requests=3), "standard")
