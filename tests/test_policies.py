"""Policies: what they decide, that what they declare is true, and that sharded batches agree bit for bit."""

import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax.sharding import PartitionSpec as P

from specav import policies
from specav.costs import cost_table, flat_costs
from specav.features import FEATURES, DraftFeatures
from specav.policies import Policy, PolicyInputs
from specav.survival import survival_probabilities
from specav.trimmer import allocate_budget, choose_budget
from tests.helpers import assert_stays_on_device, count_traces

B, K = 4, 3
COSTS = cost_table([4, 6, 8, 12], [1.0, 1.2, 1.7, 2.6], draft_sizes=[4], draft_times=[0.3])
LIBRARY = {
    "everything": policies.everything(),
    "nothing": policies.nothing(),
    "fixed": policies.fixed(2),
    "max q": policies.threshold("logit_q_max", 0.0),
    "drawn q": policies.threshold("logit_q_sampled", 0.0),
    "acceptance": policies.threshold("acceptance", 0.5),
    "survival": policies.survival_threshold(0.3),
    "trimmer": policies.trimmer(COSTS, initial_budget=5),
    "trimmer, pairwise": policies.trimmer(COSTS, initial_budget=5, method="pairwise"),
    "live": policies.live_argmax(COSTS),
}
every = pytest.mark.parametrize("name", LIBRARY)


def make_inputs(seed, batch=B, coarse=True):
    """A round of drafts; coarse values force ties."""
    rng = np.random.default_rng(seed)

    def values(shape):
        raw = rng.choice([0.25, 0.5, 1.0], shape) if coarse else rng.uniform(0, 1, shape)
        return jnp.asarray(raw, jnp.float32)

    num_drafts = jnp.asarray(rng.integers(0, K + 1, batch), jnp.int32)
    acceptance = values((batch, K))
    features = DraftFeatures(**{name: 4 * values((batch, K)) - 2 for name in FEATURES})
    return PolicyInputs(
        features=features,
        draft_tokens=jnp.asarray(rng.integers(0, 5, (batch, K)), jnp.int32),
        num_drafts=num_drafts,
        acceptance=acceptance,
        survival=survival_probabilities(acceptance, num_drafts),
        active=jnp.asarray(rng.uniform(size=batch) < 0.8),
    )


@functools.cache
def jitted(name):
    return jax.jit(LIBRARY[name].decide)


@every
@given(seed=st.integers(0, 1000))
def test_decisions_stay_within_the_drafts(name, seed):
    inputs = make_inputs(seed)
    num_verified, state = jitted(name)(LIBRARY[name].init(), inputs)
    assert num_verified.dtype == jnp.int32 and num_verified.shape == (B,)
    assert jax.tree.structure(state) == jax.tree.structure(LIBRARY[name].init())
    assert np.all((num_verified >= 0) & (num_verified <= inputs.num_drafts))
    assert np.all(np.where(inputs.active, 0, num_verified) == 0)


@every
def test_slots_are_what_decide_counts(name):
    policy = LIBRARY[name]
    if policy.slots is None:
        assert policy.window == "past" and not policy.reads
        return
    slots = jax.jit(policy.slots)
    for seed in range(10):
        mask, _ = slots(policy.init(), make_inputs(seed))
        num_verified, _ = jitted(name)(policy.init(), make_inputs(seed))
        np.testing.assert_array_equal(mask, np.arange(K) < np.asarray(num_verified)[:, None])


def test_simple_policies_by_hand():
    n = jnp.array([0, 1, 3, 3])
    acceptance = jnp.array([[0.9, 0.9, 0.9], [0.9, 0.9, 0.9], [0.9, 0.4, 0.9], [0.5, jnp.nan, 0.9]])
    inputs = PolicyInputs(num_drafts=n, acceptance=acceptance, survival=survival_probabilities(acceptance, n))
    decide = lambda policy: policy.decide(policy.init(), inputs)[0].tolist()  # noqa: E731
    assert decide(policies.everything()) == [0, 1, 3, 3]
    assert decide(policies.nothing()) == [0, 0, 0, 0]
    assert decide(policies.fixed(2)) == [0, 1, 2, 2]
    assert decide(policies.threshold("acceptance", 0.5)) == [0, 1, 1, 1]
    assert decide(policies.survival_threshold(0.35)) == [0, 1, 2, 1]
    # Without `active` every request counts; with it the others verify nothing. Negative counts are none.
    inputs = inputs._replace(active=jnp.array([True, True, True, False]), num_drafts=jnp.array([-1, 1, 3, 3]))
    assert decide(policies.everything()) == [0, 1, 3, 0]


def test_trimmer_spends_the_previous_rounds_budget():
    policy = policies.trimmer(COSTS)
    state, budget = policy.init(), None
    decide, allocate, choose = jax.jit(policy.decide), jax.jit(allocate_budget), jax.jit(choose_budget)
    seen = []
    for seed in range(12):
        inputs = make_inputs(seed, coarse=False)
        num_drafts = jnp.where(inputs.active, inputs.num_drafts, 0)
        got, state = decide(state, inputs)
        want = num_drafts if budget is None else allocate(inputs.survival, budget, num_drafts)
        np.testing.assert_array_equal(got, want)
        active = jnp.sum(inputs.active, dtype=jnp.int32)
        budget = choose(inputs.survival, num_drafts, COSTS, active, active)
        assert int(state.budget) == int(budget)
        seen.append(int(budget))
    assert len(set(seen)) > 2
    cautious = policies.trimmer(COSTS, initial_budget=0)
    assert cautious.decide(cautious.init(), inputs)[0].tolist() == [0] * B


def test_step_counts_of_the_caller_replace_the_defaults():
    acceptance, n = jnp.array([[0.6, 0.5]]), jnp.array([2])
    costs = cost_table([1, 2, 8], [1.0, 2.0, 2.01], draft_sizes=[1], draft_times=[0.01])
    inputs = PolicyInputs(num_drafts=n, acceptance=acceptance, survival=survival_probabilities(acceptance, n))

    def budget(**counts):
        policy = policies.trimmer(costs)
        return int(policy.decide(policy.init(), inputs._replace(**counts))[1].budget)

    assert budget() == 0  # 1/1.01 beats 1.6/2.01 and 1.9/2.02
    assert budget(num_base_tokens=2) == 2  # the step is dear already
    assert budget(num_sampling=0) == 2  # nothing is emitted without drafts: 0, .6/2.01, .9/2.02
    assert budget(num_drafting=1000) == 2


def test_live_argmax_is_the_budget_of_this_round():
    inputs = make_inputs(3)
    policy = policies.live_argmax(COSTS)
    got, _ = policy.decide(policy.init(), inputs)
    drafts = jnp.where(inputs.active, inputs.num_drafts, 0)
    active = jnp.sum(inputs.active, dtype=jnp.int32)
    want = allocate_budget(inputs.survival, choose_budget(inputs.survival, drafts, COSTS, active, active), drafts)
    np.testing.assert_array_equal(got, want)


# What a declaration claims, tried out. Values of the class a decision may not read are flipped.


def influences(inputs, request, position, seed):
    """The inputs with everything from `position` of one request on replaced, except num_drafts."""
    other = make_inputs(seed + 10_000)

    def swap(mine, theirs):
        if mine is None or mine.ndim != 2:
            return mine
        return mine.at[request, position:].set(theirs[request, position:])

    changed = jax.tree.map(swap, inputs, other)
    return changed._replace(survival=survival_probabilities(changed.acceptance, inputs.num_drafts))


@every
@settings(max_examples=60)
@given(seed=st.integers(0, 5000), request=st.integers(0, B - 1), position=st.integers(0, K - 1))
def test_windows_are_true(name, seed, request, position):
    """Causal: changing positions >= i of a request moves no decision about positions < i. Past: moves none at all."""
    policy = LIBRARY[name]
    inputs = make_inputs(seed)
    changed = influences(inputs, request, position, seed)
    before, _ = jitted(name)(policy.init(), inputs)
    after, _ = jitted(name)(policy.init(), changed)
    if policy.window == "past":
        np.testing.assert_array_equal(before, after)
    elif policy.window == "causal":
        assert min(int(before[request]), position) == min(int(after[request]), position)
    if policy.couples == "none":
        np.testing.assert_array_equal(np.delete(before, request), np.delete(after, request))


def test_live_argmax_does_look_ahead():
    """The second position's confidence decides whether the first is verified: why its window is "block"."""
    policy = policies.live_argmax(cost_table([1, 2, 3], [1.0, 2.0, 2.22]))
    n = jnp.array([2])

    def decide(second):
        survival = survival_probabilities(jnp.array([[0.8, second]]), n)
        return policy.decide(policy.init(), PolicyInputs(num_drafts=n, survival=survival))[0].tolist()

    assert decide(0.9) == [2] and decide(0.0) == [0]


@every
def test_reads_are_true(name):
    """A policy works on what it declares alone, and asks by name for what is missing."""
    policy, full = LIBRARY[name], make_inputs(1)
    kept = {read: getattr(full, read) for read in policy.reads if read not in FEATURES}
    shown = DraftFeatures(**{read: getattr(full.features, read) for read in policy.reads if read in FEATURES})
    bare = PolicyInputs(num_drafts=full.num_drafts, active=full.active, features=shown, **kept)
    np.testing.assert_array_equal(policy.decide(policy.init(), bare)[0], policy.decide(policy.init(), full)[0])
    for read in policy.reads:
        with pytest.raises(ValueError, match=f"{read}: policy '.*' reads it, got None"):
            policy.decide(policy.init(), PolicyInputs(num_drafts=full.num_drafts))
    with pytest.raises(ValueError, match=r"inputs\.num_drafts: every policy needs it"):
        policy.decide(policy.init(), PolicyInputs())


ALL, NOT_STANDARD, DEFERRED = ("standard", "coupled", "deferred"), ("coupled", "deferred"), ("deferred",)


@pytest.mark.parametrize(
    ("name", "estimator", "drafter", "depends", "rules"),
    [
        ("everything", "draw", "autoregressive", "past", ALL),
        ("fixed", "draw", "autoregressive", "past", ALL),
        ("nothing", "draw", "autoregressive", "past", ALL),
        ("max q", "draw", "autoregressive", "prefix", ALL),
        ("drawn q", "prefix", "autoregressive", "draw", NOT_STANDARD),
        ("drawn q", "prefix", "parallel", "draw", NOT_STANDARD),
        ("drawn q", "prefix", "point_mass", "draw", ALL),
        ("acceptance", "prefix", "autoregressive", "prefix", ALL),
        ("acceptance", "draw", "autoregressive", "draw", NOT_STANDARD),
        ("survival", "draw", "parallel", "draw", NOT_STANDARD),
        ("trimmer", "prefix", "autoregressive", "prefix", ALL),
        ("trimmer", "draw", "autoregressive", "draw", NOT_STANDARD),
        ("trimmer", "draw", "point_mass", "draw", ALL),
        ("live", "prefix", "autoregressive", "block", DEFERRED),
        ("live", "draw", "autoregressive", "block", DEFERRED),
        ("live", "prefix", "parallel", "block", ALL),
        ("live", "draw", "parallel", "block", DEFERRED),
        ("live", "draw", "point_mass", "block", ALL),
    ],
)
def test_verdicts(name, estimator, drafter, depends, rules):
    policy = LIBRARY[name]
    assert policies.declared_dependence(policy, estimator) == depends
    found = policies.verdict(policy, acceptance_depends_on=estimator, drafter=drafter)
    assert found == (depends, rules, rules)
    assert policies.lossless_rules(policy, estimator, drafter) == rules
    for rule in ALL:
        if rule in rules:
            policies.require_lossless(policy, rule, acceptance_depends_on=estimator, drafter=drafter)
        else:
            with pytest.raises(ValueError, match=f"is not lossless under the {rule} rule with {drafter} drafts"):
                policies.require_lossless(policy, rule, acceptance_depends_on=estimator, drafter=drafter)


def test_refusals_name_policy_feature_and_rule():
    with pytest.raises(
        ValueError,
        match=r"policy 'threshold\(logit_q_sampled >= 0\)' is not lossless under the standard rule .*"
        r"reads 'logit_q_sampled', which depends on the drawn token x_i itself.*under: coupled, deferred",
    ):
        policies.require_lossless(LIBRARY["drawn q"], "standard")
    with pytest.raises(ValueError, match=r"'trimmer'.*standard rule.*'survival'.*features are of class 'draw'"):
        policies.require_lossless(LIBRARY["trimmer"], "standard", "draw")
    with pytest.raises(ValueError, match=r"'live_argmax'.*coupled rule.*'survival' at later positions.*: deferred"):
        policies.require_lossless(LIBRARY["live"], "coupled")


def test_marginal_and_joint_verdicts_are_apart():
    """Each request verified iff the other one's drawn q is high: own laws exact, joint law bent."""

    def decide(state, inputs):
        high = inputs.features.logit_q_sampled[:, 0] > 0
        return jnp.where(jnp.roll(high, 1), inputs.num_drafts, 0), state

    cross = Policy(lambda: (), decide, "cross", "causal", ("logit_q_sampled",), "live")
    found = policies.verdict(cross)
    # Declared as causal with a draw feature, although it reads none of its own draws: conservative.
    assert found.marginal == NOT_STANDARD and found.joint == DEFERRED
    policies.require_lossless(cross, "coupled", joint=False)
    with pytest.raises(ValueError, match=r"'cross'.*coupled rule.*of other requests.*joint law.*joint=False"):
        policies.require_lossless(cross, "coupled")
    mean = Policy(lambda: (), decide, "block mean", "causal", ("entropy",), "live")
    assert policies.verdict(mean) == ("prefix", ALL, DEFERRED)
    assert policies.lossless_rules(mean, joint=False) == ALL
    assert policies.verdict(mean, drafter="parallel") == ("prefix", ALL, ALL)


def test_false_declarations_are_refused():
    good = LIBRARY["fixed"]
    for field, value in (("window", "future"), ("couples", "some"), ("reads", ("q",))):
        with pytest.raises(ValueError, match=rf"{field} of policy 'fixed\(2\)': expected one of"):
            policies.declared_dependence(good._replace(**{field: value}))
    with pytest.raises(ValueError, match="rule: expected one of 'standard', 'coupled', 'deferred', got 'greedy'"):
        policies.require_lossless(good, "greedy")
    with pytest.raises(ValueError, match="drafter: expected one of"):
        policies.lossless_rules(good, drafter="tree")
    with pytest.raises(ValueError, match="acceptance_depends_on: expected one of 'prefix', 'draw'"):
        policies.declared_dependence(good, "past")


@every
def test_compiles_once_and_stays_on_the_device(name):
    policy = LIBRARY[name]
    step, traces = count_traces(policy.decide)
    state = policy.init()
    for seed in range(20):
        _, state = step(state, make_inputs(seed))
    assert len(traces) == 1
    assert_stays_on_device(policy.decide, policy.init(), make_inputs(0))


@every
def test_vmap_and_scan(name):
    policy = LIBRARY[name]
    rounds = [make_inputs(seed) for seed in range(6)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *rounds)
    state, want = policy.init(), []
    for inputs in rounds:
        got, state = jitted(name)(state, inputs)
        want.append(got)
    last, scanned = jax.lax.scan(lambda s, x: policy.decide(s, x)[::-1], policy.init(), stacked)
    np.testing.assert_array_equal(scanned, want)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool(jnp.all(a == b)), last, state))
    mapped, _ = jax.vmap(policy.decide, in_axes=(None, 0))(policy.init(), stacked)
    fresh = [jitted(name)(policy.init(), inputs)[0] for inputs in rounds]
    np.testing.assert_array_equal(mapped, fresh)


@pytest.mark.parametrize("make", [policies.trimmer, policies.live_argmax])
@pytest.mark.parametrize("method", ["sort", "pairwise"])
def test_sharded_batch_equals_the_whole(make, method):
    """Four devices, two rows each: every replica computes the integers of the unsharded batch."""
    assert jax.device_count() >= 4
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("d",))
    rounds = [make_inputs(seed, batch=8) for seed in range(8)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *rounds)
    whole, local = make(COSTS, method=method), make(COSTS, method=method, axis_name="d")

    def run(policy, inputs):
        def body(state, x):
            num_verified, state = policy.decide(state, x)
            return state, (num_verified, state)

        # The carry's type must not change: the budget is known to be the same on every device.
        return jax.lax.scan(body, policy.init(), inputs)[1]

    want_verified, want_state = jax.jit(functools.partial(run, whole))(stacked)
    sharded = jax.jit(
        jax.shard_map(functools.partial(run, local), mesh=mesh, in_specs=P(None, "d"), out_specs=(P(None, "d"), P()))
    )
    got_verified, got_state = sharded(stacked)
    np.testing.assert_array_equal(got_verified, want_verified)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool(jnp.all(a == b)), got_state, want_state))

    def replicas(inputs):
        _, state = run(local, inputs)
        return jax.tree.map(lambda x: x[:, None], state)

    each = jax.jit(jax.shard_map(replicas, mesh=mesh, in_specs=P(None, "d"), out_specs=P(None, "d"), check_vma=False))(
        stacked
    )
    for leaf, one in zip(jax.tree.leaves(each), jax.tree.leaves(want_state)):
        assert leaf.shape == (8, 4)
        np.testing.assert_array_equal(leaf, np.broadcast_to(np.asarray(one)[:, None], (8, 4)))


def test_sharded_counts_are_summed():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("d",))
    inputs = make_inputs(0, batch=8)._replace(active=None)
    local = policies.trimmer(COSTS, axis_name="d")

    def run(inputs, base):
        return local.decide(local.init(), inputs._replace(num_base_tokens=base[0]))[1].budget

    base = jnp.array([1, 0, 4, 2], jnp.int32)
    got = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=(P("d"), P("d")), out_specs=P()))(inputs, base)
    assert int(got) == int(choose_budget(inputs.survival, inputs.num_drafts, COSTS, 7, 8))


@pytest.mark.usefixtures("own_checks")
def test_errors():
    with pytest.raises(ValueError, match="num_verified: expected an int of at least 0, got -1"):
        policies.fixed(-1)
    with pytest.raises(ValueError, match="feature_name: expected one of 'logit_q_max'"):
        policies.threshold("q", 0.5)
    with pytest.raises(ValueError, match="minimum: expected a number in"):
        policies.threshold("entropy", float("nan"))
    with pytest.raises(ValueError, match="minimum: expected a number in"):
        policies.survival_threshold(1.5)
    with pytest.raises(ValueError, match="initial_budget: expected an int of at least 0"):
        policies.trimmer(COSTS, initial_budget=-1)
    with pytest.raises(ValueError, match="method: expected one of"):
        policies.live_argmax(flat_costs(1.0), method="topk")
    inputs = make_inputs(0)
    trimmer = policies.trimmer(COSTS)
    with pytest.raises(ValueError, match=r"inputs\.survival: expected shape \[B=4, K\], got \[3, 3\]"):
        trimmer.decide(trimmer.init(), inputs._replace(survival=inputs.survival[:3]))
    with pytest.raises(TypeError, match=r"inputs\.num_base_tokens: expected an integer dtype"):
        trimmer.decide(trimmer.init(), inputs._replace(num_base_tokens=1.0))
    with pytest.raises(TypeError, match=r"inputs\.active: expected bool"):
        policies.everything().decide((), inputs._replace(active=inputs.num_drafts))
