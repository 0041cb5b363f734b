"""The exact law of emitted tokens: losslessness of legal policies, leaks of the others, and an independent program."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specav import estimators, policies
from specav.costs import cost_table
from specav.decode import decoder
from specav.drafting import autoregressive_drafter
from specav.lossless.catalogue import rising_costs, stair_costs
from specav.lossless.exact import (
    estimated_paths,
    exact_output_law,
    largest_bias,
    markov_model,
    table_family,
    total_variation,
)
from specav.lossless.scheme import Scheme, processed, sampled_with
from specav.lossless.worlds import distinct_rows
from specav.sampling import SamplingParams
from tests.brute_force import Game, brute_force_law, on_lists
from tests.helpers import bigram_model
from tests.laws import chi_square

RULES = ("standard", "coupled", "deferred")
EXACT = 1e-12
A, B = 0, 1


def histories(vocabulary, depth):
    return sum(vocabulary**length for length in range(depth + 1))


def family(seed, number, vocabulary, *, depth=2, parallel=0):
    """(draft, target, prompts): random models of the last `depth` tokens, half of the pairs close to each other."""
    rng = np.random.default_rng(seed)
    shape = (number, histories(vocabulary, depth), *([parallel] if parallel else []), vocabulary)
    scale = rng.choice([0.5, 1.5, 4.0], (number, *[1] * (len(shape) - 1)))
    draft, target = rng.normal(size=(2, *shape)) * scale
    draft[::2] = target[::2] + 0.3 * draft[::2]
    target = target[:, :, 0] if parallel else target
    return table_family(draft), table_family(target), np.arange(number)[:, None]


def output_law(policy, rule, *, seed=0, number=200, vocabulary=2, num_draft_tokens=2, num_tokens=3, **options):
    """The law over a family of models."""
    kind = options.get("drafter", "autoregressive")
    parallel = num_draft_tokens if getattr(kind, "drafter", kind) == "parallel" else 0
    draft, target, prompts = family(seed, number, vocabulary, parallel=parallel)
    return exact_output_law(
        policy,
        draft,
        target,
        rule=rule,
        num_draft_tokens=num_draft_tokens,
        num_tokens=num_tokens,
        prompts=prompts,
        **options,
    )


def constant(*rows):
    """A model with the same law everywhere, or [K, V] laws of a parallel drafter."""
    return markov_model(np.log(np.asarray([rows if len(rows) > 1 else rows[0]] * 2, np.float64)))


def seen(name, decide):
    """A policy from a function of the inputs."""
    return policies.from_function(lambda state, inputs: (decide(inputs), state), name=name)


def worst(output):
    return float(total_variation(output).max())


# ------------------------------------------------------------------------------------------ legal pairs are exact

LEARNS = estimators.online_logistic(2, refit_interval=1)
LEARNS_DRAWS = estimators.online_logistic(2, ("logit_q_sampled", "entropy"), refit_interval=1)
TRIMMER, LIVE = policies.trimmer(rising_costs(1, 2)), policies.live_argmax(stair_costs(1, 2))


def seeded(seed):
    """Verifies a number drawn with a key that it carries, looking at nothing."""

    def decide(state, inputs):
        key, sub = jax.random.split(state)
        return jax.random.randint(sub, inputs.num_drafts.shape, 0, inputs.num_drafts + 1), key

    return policies.from_function(decide, name="seeded", init=lambda: jax.random.key(seed))


# name -> (policy, estimator, rules under which it is exact)
LEGAL = {
    "everything": (policies.everything(), None, RULES),
    "nothing": (policies.nothing(), None, RULES),
    "max q": (policies.threshold("logit_q_max", 0.5), None, RULES),
    "drawn q": (policies.threshold("logit_q_sampled", 0.0), None, RULES[1:]),
    "stop after drawn q": (policies.confidence_stop(0.5), None, RULES),
    "draft and verify": (policies.draft_and_verify(initial=0.5, step=0.1), None, RULES),
    "lagged budget, learns": (TRIMMER, LEARNS, RULES),
    "lagged budget, learns from draws": (TRIMMER, LEARNS_DRAWS, RULES[1:]),
    "live budget, learns from draws": (LIVE, LEARNS_DRAWS, RULES[2:]),
    "state with a key": (seeded(3), None, RULES),
}


@pytest.mark.parametrize(("name", "rule"), [(n, r) for n, entry in LEGAL.items() for r in entry[2]])
def test_legal_policies_leave_the_law_of_200_models_as_it_is(name, rule):
    policy, estimator, _ = LEGAL[name]
    for vocabulary in (2, 3):
        output = output_law(policy, rule, vocabulary=vocabulary, estimator=estimator)
        assert worst(output) < EXACT, largest_bias(output)
        np.testing.assert_allclose(output.law.sum(axis=1), 1, atol=EXACT)


@pytest.mark.parametrize("refill", ["block", "eager"])
@pytest.mark.parametrize("name", ["drawn q", "live budget, learns from draws", "nothing"])
def test_both_refills_of_the_deferred_rule_are_exact_and_may_be_cut_short(name, refill):
    policy, estimator, _ = LEGAL[name]
    for num_rounds in (0, 1, 2, None):
        output = output_law(
            policy, "deferred", number=50, num_tokens=4, refill=refill, num_rounds=num_rounds, estimator=estimator
        )
        assert worst(output) < EXACT, (num_rounds, largest_bias(output))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["max q", "drawn q", "lagged budget, learns"])
@pytest.mark.parametrize("kind", ["parallel", "point_mass"])
def test_other_drafters_are_exact(kind, name, rule):
    policy, estimator, rules = LEGAL[name]
    output = output_law(policy, rule, vocabulary=3, drafter=kind, estimator=estimator)
    exact = kind == "point_mass" or rule in rules
    assert (worst(output) < EXACT) == exact, largest_bias(output)


@pytest.mark.parametrize("rule", RULES)
def test_sampling_parameters_on_either_side_are_exact(rule):
    sides = [SamplingParams(0.6), SamplingParams(1.3, None, 0.8), SamplingParams(0.0), SamplingParams(1.0, 2, 0.9)]
    for draft_side, target_side in zip(sides, sides[1:] + sides[:1], strict=True):
        scheme = Scheme(drawn=sampled_with(draft_side), target=sampled_with(target_side))
        for name in ("max q", "stop after drawn q"):
            output = output_law(LEGAL[name][0], rule, number=60, vocabulary=3, drafter=scheme)
            assert worst(output) < EXACT, (name, draft_side, target_side)


@pytest.mark.parametrize("rule", RULES)
def test_the_joint_law_of_a_ragged_batch_is_exact(rule):
    estimator = estimators.online_logistic(2, refit_interval=1)
    for policy, own in ((policies.trimmer(rising_costs(2, 2)), estimator), (policies.threshold("entropy", 0.5), None)):
        for num_drafts in (None, (2, 1), (0, 2)):
            output = output_law(
                policy, rule, number=12, num_tokens=2, num_requests=2, num_drafts=num_drafts, estimator=own
            )
            assert output.law.shape == (12, 4, 4)
            assert worst(output) < EXACT, (policy.name, num_drafts, largest_bias(output))


@hypothesis.settings(max_examples=12)
@hypothesis.given(
    seed=st.integers(0, 10**6),
    rule=st.sampled_from(RULES),
    name=st.sampled_from(["max q", "stop after drawn q", "draft and verify"]),
    vocabulary=st.integers(2, 4),
    num_tokens=st.integers(1, 4),
    num_rounds=st.sampled_from([None, 1, 2]),
    refill=st.sampled_from(["block", "eager"]),
)
def test_exact_for_any_models_and_never_more_paths_than_estimated(
    seed, rule, name, vocabulary, num_tokens, num_rounds, refill
):
    policy = LEGAL[name][0]
    options = {"num_rounds": num_rounds, "refill": refill}
    output = output_law(policy, rule, seed=seed, number=3, vocabulary=vocabulary, num_tokens=num_tokens, **options)
    assert worst(output) < EXACT
    shape = {"num_draft_tokens": 2, "num_tokens": num_tokens, "vocabulary": vocabulary, "num_batches": 3}
    assert output.num_paths <= estimated_paths(policy, rule=rule, **shape, **options)


def test_three_drafts_over_three_tokens_in_two_rounds():
    policy = policies.trimmer(rising_costs(1, 3))
    estimator = estimators.online_logistic(3, refit_interval=1)
    draft, target, prompts = family(5, 1, 3)
    for rule in RULES:
        output = exact_output_law(
            policy,
            draft,
            target,
            rule=rule,
            num_draft_tokens=3,
            num_tokens=8,
            prompts=prompts,
            num_rounds=2,
            estimator=estimator,
        )
        assert worst(output) < EXACT


# ----------------------------------------------------------------------------- worked examples, and the table of leaks


@pytest.mark.parametrize("rule", RULES)
def test_discarding_an_unlikely_draw_gives_4_to_6(rule):
    discard = policies.threshold("logit_q_sampled", 0.0)  # q(x) >= .5
    output = exact_output_law(
        discard, constant([0.2, 0.8]), constant([0.5, 0.5]), rule=rule, num_draft_tokens=1, num_tokens=1
    )
    expected = [0.4, 0.6] if rule == "standard" else [0.5, 0.5]
    np.testing.assert_allclose(output.law[0], expected, atol=EXACT)
    np.testing.assert_allclose(output.target[0], [0.5, 0.5], atol=EXACT)
    np.testing.assert_allclose(total_variation(output), [0.1 if rule == "standard" else 0], atol=EXACT)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("lagged", [False, True])
def test_a_live_budget_gives_85_to_15(lagged, rule):
    # Step times 1, 2, 2.22; a_1 = .8; the confidence of position 2 is .9 after A and 0 after B.
    costs = cost_table(np.asarray([1, 2, 3]), np.asarray([1.0, 2.0, 2.22]))
    budget = policies.trimmer(costs) if lagged else policies.live_argmax(costs)

    def decide(state, inputs):
        second = jnp.where(inputs.draft_tokens[:, 0] == A, 0.72, 0.0)
        return budget.decide(state, inputs._replace(survival=jnp.stack([jnp.full((1,), 0.8), second], axis=1)))

    output = exact_output_law(
        budget._replace(decide=decide),
        constant([0.5, 0.5]),
        constant([0.7, 0.3]),
        rule=rule,
        num_draft_tokens=2,
        num_tokens=1,
    )
    expected = [0.85, 0.15] if rule == "standard" and not lagged else [0.7, 0.3]
    np.testing.assert_allclose(output.law[0], expected, atol=1e-9)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("sequential", [False, True])
def test_each_verified_iff_the_other_drew_a_bends_the_joint_law_alone(sequential, rule):
    def decide(inputs):
        other_drew_a = (inputs.draft_tokens[::-1, 0] == A).astype(jnp.int32)
        return other_drew_a.at[0].set(1) if sequential else other_drew_a

    half = constant([0.5, 0.5])
    output = exact_output_law(
        seen("cross", decide), half, half, rule=rule, num_draft_tokens=1, num_tokens=1, num_requests=2
    )
    bent = rule == "standard" and not sequential
    expected = [0.3125, 0.1875, 0.1875, 0.3125] if bent else [0.25] * 4
    np.testing.assert_allclose(output.law.reshape(4), expected, atol=EXACT)
    for axis in (1, 2):  # every marginal is exact
        np.testing.assert_allclose(output.law.sum(axis=axis), [[0.5, 0.5]], atol=EXACT)
    if bent:
        bias = largest_bias(output)
        assert bias.request is None and bias.tokens in {((x,), (y,)) for x in (A, B) for y in (A, B)}
        assert abs(bias.probability - bias.target_probability) == pytest.approx(0.0625)


def of_second(read):
    """Verifies both drafts or none, by what is seen of the second one."""
    return lambda inputs: jnp.where(read(inputs), inputs.num_drafts, 0)


# name -> (policy, estimator, requests, K, rules that it bends)
LEAKS = {
    "drawn q": (policies.threshold("logit_q_sampled", 0.0), None, 1, 2, RULES[:1]),
    "max q of x_2 decides about x_1": (
        seen("max q of x_2", of_second(lambda i: i.features.logit_q_max[:, 1] > 0.5)),
        None,
        1,
        2,
        RULES[:1],
    ),
    "q of the drawn x_2 decides about x_1": (
        seen("drawn q of x_2", of_second(lambda i: i.features.logit_q_sampled[:, 1] > 0.0)),
        None,
        1,
        2,
        RULES[:2],
    ),
    "all draws": (
        seen("all draws", of_second(lambda i: jnp.sum(i.draft_tokens, axis=1) % 2 == 0)),
        None,
        1,
        2,
        RULES[:2],
    ),
    "live budget, max q": (LIVE, None, 1, 2, RULES[:1]),
    "live budget, max q, K=3": (policies.live_argmax(stair_costs(1, 3)), None, 1, 3, RULES[:2]),
    "early stop, max q, two requests": (policies.early_stop(rising_costs(2, 2)), None, 2, 2, ()),
    "tetris, two requests": (policies.tetris(2), None, 2, 2, RULES[:1]),
}


@pytest.mark.parametrize("name", list(LEAKS))
def test_the_table_of_what_bends_which_rule(name):
    policy, estimator, requests, width, bent = LEAKS[name]
    for rule in RULES:
        output = output_law(
            policy,
            rule,
            number=60 if requests == 1 else 20,
            num_tokens=2,
            num_draft_tokens=width,
            num_requests=requests,
            estimator=estimator,
        )
        if rule in bent:
            assert worst(output) > 1e-3
        else:
            assert worst(output) < EXACT, (rule, largest_bias(output))


def test_what_a_policy_reads_is_seen_whatever_it_declares():
    honest = policies.threshold("logit_q_sampled", 0.0)
    liar = honest._replace(reads=(), window="past")
    assert worst(output_law(liar, "standard")) == worst(output_law(honest, "standard")) > 0.1


def test_a_wrong_idea_of_the_draft_law_bends_every_rule():
    faults = [
        Scheme(drafter="point_mass", tested=processed),
        Scheme(drawn=sampled_with(SamplingParams(top_k=1)), tested=processed),
        Scheme(residual=lambda p, q: np.maximum(p - q, 0) + 0.01),
        Scheme(promised=sampled_with(SamplingParams(0.5))),
    ]
    for rule in RULES:
        for scheme in faults:
            assert worst(output_law(policies.everything(), rule, number=20, num_tokens=2, drafter=scheme)) > 1e-3


def test_the_largest_bias_is_that_of_the_shortest_prefix_that_shows_it():
    # Only the first token is bent, by .1: (.4, .6) instead of (.5, .5).
    discard = policies.threshold("logit_q_sampled", 0.0)
    draft = table_family(np.log([[[0.2, 0.8], [0.5, 0.5], [0.5, 0.5]]]))
    half = table_family(np.log([[[0.5, 0.5]] * 3]))
    output = exact_output_law(discard, draft, half, rule="standard", num_draft_tokens=1, num_tokens=2)
    bias = largest_bias(output)
    assert bias[:2] == (0, 0) and bias.tokens in {(A,), (B,)}
    assert abs(bias.probability - bias.target_probability) == pytest.approx(0.1)
    assert total_variation(output.law[0], output.target[0]) == pytest.approx(total_variation(output)[0])


# ------------------------------------------------------------------------------------------- independent programs

# The verifier believes a wrong draft law in these, so that every decision shows in what is emitted, also of policies
# that would leave a right law as it is.
WRONG = sampled_with(SamplingParams(2.0))
PAIR = policies.trimmer(rising_costs(2, 2), initial_budget=1)


def sensitive():
    """A policy of which every input and the state change every decision."""

    def decide(state, inputs):
        ints = (
            *(jnp.round(4096 * values).astype(jnp.int32) for values in (inputs.acceptance, inputs.survival)),
            *(jnp.round(64 * inputs.features.entropy).astype(jnp.int32), inputs.draft_tokens),
            *(inputs.active.astype(jnp.int32), inputs.num_drafting, inputs.last_accepted, inputs.last_tested),
        )
        for prime, values in zip((3, 5, 7, 11, 13, 17, 19, 23), ints, strict=True):
            places = 1 + jnp.arange(values.size, dtype=jnp.int32)
            state = state + prime * jnp.sum(places * values.reshape(-1))
        rows = jnp.arange(len(inputs.num_drafts), dtype=jnp.int32)
        return (state + rows) % (inputs.num_drafts + 1), state % 1009

    return policies.from_function(decide, name="sensitive", init=lambda: jnp.zeros((), jnp.int32))


SENSITIVE = sensitive()
PREDICTIONS = seen(  # without a state of its own
    "predictions",
    lambda inputs: jnp.sum(jnp.round(4096 * inputs.acceptance).astype(jnp.int32), axis=1) % (inputs.num_drafts + 1),
)

# name -> (policy, estimator, rule, options)
AGREEMENT = {
    "everything seen": (SENSITIVE, LEARNS_DRAWS, "coupled", {"num_tokens": 3}),
    "everything seen, batch": (SENSITIVE, LEARNS_DRAWS, "standard", {"num_drafts": (2, 1)}),
    "predictions alone": (PREDICTIONS, LEARNS_DRAWS, "coupled", {"num_tokens": 4}),
    "everything seen, deferred batch": (SENSITIVE, LEARNS_DRAWS, "deferred", {"num_drafts": (1, 2)}),
    "everything seen, eager refill, cut short": (
        SENSITIVE,
        LEARNS_DRAWS,
        "deferred",
        {"num_tokens": 6, "refill": "eager", "num_rounds": 3},
    ),
    "lagged budget, ragged batch": (PAIR, LEARNS, "standard", {"num_drafts": (2, 1)}),
    "lagged budget, deferred batch": (PAIR, None, "deferred", {"num_drafts": (2, 1)}),
    "drawn q, parallel, cut short": (
        policies.threshold("logit_q_sampled", 0.0),
        None,
        "standard",
        {"drafter": "parallel", "num_tokens": 3, "num_rounds": 1},
    ),
    "thresholds from past rounds": (
        policies.draft_and_verify(initial=0.5, step=0.3, threshold_decay=0.1, goal=0.6),
        None,
        "standard",
        {"num_tokens": 3},
    ),
    "point mass": (policies.threshold("logit_q_max", 0.5), None, "coupled", {"drafter": "point_mass", "num_tokens": 4}),
    "top-p, three tokens": (
        policies.clear_short(policies.threshold("logit_q_sampled", 0.0), 2),
        None,
        "coupled",
        {"drawn": sampled_with(SamplingParams(0.7, None, 0.8)), "vocabulary": 3},
    ),
    "mean over the batch, deferred": (
        policies.mean_threshold("logit_q_sampled", 1.0, over="batch"),
        None,
        "deferred",
        {"num_drafts": (1, 2), "refill": "eager"},
    ),
}


@pytest.mark.parametrize("name", list(AGREEMENT))
def test_agrees_with_a_plain_program_run_over_all_its_choices(name):
    policy, estimator, rule, options = AGREEMENT[name]
    options = dict(options)
    vocabulary, num_tokens = options.pop("vocabulary", 2), options.pop("num_tokens", 2)
    kind, num_drafts = options.pop("drafter", "autoregressive"), options.pop("num_drafts", (2,))
    scheme = Scheme(kind, drawn=options.pop("drawn", processed), tested=WRONG)
    draft, target, _ = family(7, 4, vocabulary, parallel=2 if kind == "parallel" else 0)
    prompts = ((1,), (2,))[: len(num_drafts)]
    output = exact_output_law(
        policy,
        draft,
        target,
        rule=rule,
        num_draft_tokens=2,
        num_tokens=num_tokens,
        prompts=np.asarray([prompts]),
        num_requests=len(prompts),
        num_drafts=num_drafts,
        estimator=estimator,
        drafter=scheme,
        **options,
    )
    drawn, tested, wanted = (
        functools.cache(lambda raw, law=law: law(np.asarray(raw)).tolist())
        for law in (scheme.drawn, WRONG, scheme.target)
    )
    game = Game(
        policy,
        on_lists(draft),
        on_lists(target),
        rule,
        prompts,
        num_drafts,
        2,
        num_tokens,
        kind,
        draft_law=drawn,
        tested_law=tested,
        target_law=wanted,
        estimator=estimator,
        **options,
    )
    assert worst(output) > 1e-3
    np.testing.assert_allclose(output.law[0], brute_force_law(game, vocabulary), rtol=0, atol=EXACT)


def test_agrees_with_the_decoding_loop_on_a_policy_that_leaks():
    # 50,000 runs of one request each, with estimators of their own, against the bent law of the first three tokens.
    leaks = policies.survival_threshold(0.68)
    tables = np.random.default_rng(2).normal(size=(2, 2, 2)) * 1.5
    draft, target = (np.asarray(t, np.float32).astype(np.float64) for t in tables)
    output = exact_output_law(
        leaks,
        markov_model(draft),
        markov_model(target),
        rule="standard",
        num_draft_tokens=2,
        num_tokens=3,
        estimator=LEARNS_DRAWS,
    )
    loop = decoder(
        bigram_model(jnp.asarray(target, jnp.float32)),
        autoregressive_drafter(bigram_model(jnp.asarray(draft, jnp.float32)), 2),
        num_draft_tokens=2,
        max_new_tokens=5,  # no block of the first three tokens is cut by the limit
        policy=leaks,
        estimator=LEARNS_DRAWS,
        rule="standard",
        require_lossless=False,
    )

    def run(key):
        start = loop.init(key[None], jnp.zeros((1, 1), jnp.int32), jnp.ones((1,), jnp.int32), (), ())
        return loop.run(start).tokens[0, 1:4]

    number = 50_000
    tokens = np.asarray(jax.jit(jax.vmap(run))(jax.random.split(jax.random.key(0), number)))
    counts = np.bincount(tokens @ np.asarray([4, 2, 1]), minlength=8)
    assert chi_square(counts, output.law[0]).passed
    assert total_variation(output)[0] > 0.1 and not chi_square(counts, output.target[0]).passed


# --------------------------------------------------------------------------------------------- refusals, and parts


def test_too_many_paths_are_refused_with_the_number():
    draft, target, prompts = family(0, 2, 3)
    options = {"rule": "coupled", "num_draft_tokens": 5, "num_tokens": 6}
    number = estimated_paths(TRIMMER, vocabulary=3, num_batches=2, **options)
    assert number > 10**8
    with pytest.raises(ValueError, match=f"max_paths: expected at most 100,000,000 histories.*{number:,}"):
        exact_output_law(TRIMMER, draft, target, prompts=prompts, **options)


def test_the_estimate_by_hand():
    # K = 1, V = 2, one token: 2 drafts, verified: accepted (and a bonus of 2) or rejected (1 residual token): 3 ways.
    shape = {"num_draft_tokens": 1, "num_tokens": 1, "vocabulary": 2}
    assert estimated_paths(TRIMMER, rule="standard", **shape) == 2 * 3
    assert estimated_paths(TRIMMER, rule="standard", num_requests=2, **shape) == (2 * 3) ** 2
    assert estimated_paths(TRIMMER, rule="standard", drafter="point_mass", num_batches=5, **shape) == 5 * 3
    # Deferred, K = 2: 4 blocks. x_1 alone is tested: rejected (1 residual token), or accepted, and the token is there;
    # both are tested: rejected at x_1, at x_2, or accepted, with a bonus of 2 if it is verified: 4 ways at most.
    two = {"num_draft_tokens": 2, "num_tokens": 2, "vocabulary": 2, "rule": "deferred"}
    assert estimated_paths(TRIMMER, **(two | {"num_tokens": 1})) == 4 * 4
    # Two tokens, block by block: a rejection of x_1 starts anew, x_2 is then rejected or accepted (and a bonus of 2).
    assert estimated_paths(TRIMMER, **two) == 4 * (4 * 4 + 3)
    # A policy without a state: at most 1 + 2 + 4 + ... sequences between rounds, so long texts cost little.
    long = {"num_draft_tokens": 2, "num_tokens": 9, "vocabulary": 2, "rule": "standard"}
    assert estimated_paths(policies.everything(), **long) < 10**6 < 10**8 < estimated_paths(TRIMMER, **long)


def test_bad_arguments_are_refused():
    model = constant([0.5, 0.5])
    call = functools.partial(exact_output_law, policies.everything(), model, model, num_draft_tokens=2, num_tokens=2)
    with pytest.raises(ValueError, match="rule: expected one of 'standard', 'coupled', 'deferred', got 'magic'"):
        call(rule="magic")
    with pytest.raises(ValueError, match="refill: expected one of"):
        call(rule="standard", refill="never")
    with pytest.raises(ValueError, match="drafter: expected one of"):
        call(rule="standard", drafter="tree")
    with pytest.raises(ValueError, match=r"prompts: expected shape \[M, P\] or \[M, R=1, P\], got \[1\]"):
        call(rule="standard", prompts=np.asarray([0]))
    with pytest.raises(TypeError, match="prompts: expected an integer dtype, got float64"):
        call(rule="standard", prompts=np.asarray([[0.0]]))
    with pytest.raises(ValueError, match=r"num_drafts: expected R=1 numbers in 0..K=2, got \[3\]"):
        call(rule="standard", num_drafts=(3,))
    with pytest.raises(ValueError, match="num_tokens: expected an int of at least 1, got 0"):
        exact_output_law(policies.everything(), model, model, rule="standard", num_draft_tokens=1, num_tokens=0)
    with pytest.raises(ValueError, match=r"q: expected shape \[2\], got \[3\]"):
        total_variation(np.ones(2), np.ones(3))
    with pytest.raises(ValueError, match=r"1 \+ V .* for V=2, got 4"):
        table_family(np.zeros((1, 4, 2)))


def test_a_policy_whose_state_changes_shape_is_refused():
    grows = policies.everything()._replace(
        init=lambda: jnp.zeros((1,)), decide=lambda state, i: (i.num_drafts, jnp.concatenate([state, state]))
    )
    with pytest.raises(ValueError, match="expected a state like the initial one"):
        output_law(grows, "standard", number=2)


@hypothesis.given(seed=st.integers(0, 10**6), rows=st.integers(1, 60))
def test_distinct_rows_are_those_of_numpy(seed, rows):
    rng = np.random.default_rng(seed)
    columns = [rng.integers(0, 2, (rows, 2, 1)).astype(np.int32), rng.integers(0, 2, rows).astype(np.bool_)]
    first, inverse = distinct_rows([*columns, np.zeros((rows, 0))])
    table = np.concatenate([c.reshape(rows, -1).astype(np.int64) for c in columns], axis=1)
    assert len(first) == len(np.unique(table, axis=0))
    np.testing.assert_array_equal(table[first[inverse]], table)


def test_a_table_family_looks_up_the_last_tokens():
    tables = np.arange(2 * 7 * 2, dtype=np.float64).reshape(2, 7, 2)
    model = table_family(tables)
    tokens = np.asarray([[0, -1, -1, -1], [1, 1, -1, -1], [1, 0, 1, 1], [0, 1, 0, 1]])
    found = model(tokens, np.asarray([1, 2, 4, 3]))
    # no token; 1; 1 1 (the last two of 0 1 1); 1 0
    np.testing.assert_array_equal(found, [tables[0, 0], tables[1, 2], tables[1, 6], tables[0, 5]])
