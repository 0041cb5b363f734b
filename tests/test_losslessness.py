"""The catalogue: for every practice and rule, the exact law, the search and the proof say the same, and what they say.

The exact law is the judge: total variation below 1e-12 on every model, or above 1e-3 on one that the random search
finds. `check_non_anticipating` must find every leak, `certify` must never prove one.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import losslessness
from experiments.losslessness import ALONE, EXACT, LOOK_AHEAD, TOGETHER, Shape, measure, random_models
from specav import policies
from specav.labels import RULES
from specav.lossless.anticipation import check_non_anticipating
from specav.lossless.catalogue import CATALOGUE, rising_costs
from specav.lossless.certify import certify
from specav.lossless.exact import exact_output_law, total_variation

BENT = 1e-3
PRACTICES = {practice.name: practice for practice in CATALOGUE}
# Under the standard, the coupled and the deferred rule: every law exact, only the joint law of a batch bent, or bent.
E, J, X = "exact", "joint law bent", "bent"
EXPECTED = {
    "fixed length": (E, E, E),
    "threshold on max q": (E, E, E),
    "threshold on drawn q, discarding": (X, E, E),
    "stop after low drawn q": (E, E, E),
    "Draft & Verify, adaptive threshold": (E, E, E),
    "AdaEDL": (E, E, E),
    "SVIP": (E, E, E),
    "SpecDec++": (E, E, E),
    "EAGLE-2 score, point-mass drafts": (E, E, E),
    "EAGLE-2 score, sampled drafts": (X, E, E),
    "TETRIS": (X, E, E),
    "live argmax, max q": (X, X, E),
    "live argmax, drawn q": (X, X, E),
    "early stop, max q": (E, E, E),
    "early stop, drawn q": (X, E, E),
    "lagged budget, max q": (E, E, E),
    "lagged budget, drawn q": (X, E, E),
    "threshold clamped to the block mean": (X, X, E),
    "threshold clamped to the batch mean": (J, J, E),
    "n_min clearing": (X, X, E),
    "argmax drafts accepted with p/q": (X, X, X),
    "top-k on the drafting side only": (X, X, X),
    "q returned in bfloat16": (X, X, X),
    "top-p before temperature on one side": (X, X, X),
    "residual with an epsilon of 1e-09": (X, X, X),
    "residual with an epsilon of 1e-07": (X, X, X),
}
# What `certify` must be able to prove, joint law included, at 64 requests and 8 drafts.
PROVED = {
    "fixed length": RULES,
    "threshold on max q": RULES,
    "threshold on drawn q, discarding": ("coupled", "deferred"),
    "stop after low drawn q": RULES,
    "Draft & Verify, adaptive threshold": RULES,
    "AdaEDL": RULES,
    "SVIP": RULES,
    "SpecDec++": RULES,
    "EAGLE-2 score, point-mass drafts": RULES,
    "EAGLE-2 score, sampled drafts": ("coupled", "deferred"),
    "TETRIS": ("coupled", "deferred"),
    "lagged budget, max q": RULES,
    "lagged budget, drawn q": ("coupled", "deferred"),
}
every = pytest.mark.parametrize("name", EXPECTED)


def expected(name, rule):
    return EXPECTED[name][RULES.index(rule)]


def given(name, rule, num_requests, num_draft_tokens):
    practice = PRACTICES[name]
    return {
        "rule": rule,
        "drafter": practice.scheme,
        "num_requests": num_requests,
        "num_draft_tokens": num_draft_tokens,
        "acceptance_depends_on": practice.acceptance_depends_on,
    }


@functools.cache
def policy_of(name, num_requests, num_draft_tokens):
    return PRACTICES[name].policy(num_requests, num_draft_tokens)


def test_every_practice_has_its_verdict():
    assert list(EXPECTED) == list(PRACTICES) and set(PROVED) <= set(EXPECTED)


@every
def test_exact_laws(name):
    """200 random models each, V = 2 and 3, K = 2; two requests jointly; K = 3 where K = 2 is too short to leak."""
    for rule in RULES:
        own, joint = measure(PRACTICES[name], rule, (*ALONE, TOGETHER[0]))
        if (expected(name, rule) != E and joint < BENT) or (own < BENT and expected(name, rule) == X):
            more = measure(PRACTICES[name], rule, (*LOOK_AHEAD, TOGETHER[1]), seed=1)
            own, joint = max(own, more.own), max(joint, more.joint)
        if expected(name, rule) == E:
            assert own < EXACT and joint < EXACT, (rule, own, joint)
        elif expected(name, rule) == J:
            assert own < EXACT and joint > BENT, (rule, own, joint)
        else:
            assert own > BENT and joint > BENT, (rule, own, joint)


@pytest.mark.slow
@every
def test_exact_laws_of_longer_blocks(name):
    shapes = (Shape(2, 3, 1, 4, 200), Shape(3, 3, 1, 3, 40), Shape(2, 2, 2, 3, 40), Shape(2, 3, 2, 2, 40))
    for rule in RULES:
        own, joint = measure(PRACTICES[name], rule, shapes, seed=2)
        assert (own < EXACT) == (expected(name, rule) in (E, J)), (rule, own)
        assert (joint < EXACT) == (expected(name, rule) == E), (rule, joint)


def random_decision_table(num_draft_tokens):
    """Numbers that are an arbitrary function of all draws of the batch; another function for every model.

    A hash of the drafts and of the bits of their features, which tell models apart, stands for the table.
    """

    def decide(state, inputs):
        bits = jax.lax.bitcast_convert_type(inputs.features.logit_q_max, jnp.uint32)
        words = jnp.concatenate([bits.reshape(-1), inputs.draft_tokens.reshape(-1).astype(jnp.uint32)])
        digest = jnp.uint32(2166136261)
        for word in words:
            digest = (digest ^ word) * jnp.uint32(16777619)
            digest = digest ^ (digest >> jnp.uint32(15))
        rows = jnp.arange(len(inputs.num_drafts), dtype=jnp.uint32)
        mixed = (digest + rows * jnp.uint32(2654435761)) * jnp.uint32(2246822519)
        number = ((mixed ^ (mixed >> jnp.uint32(13))) % jnp.uint32(num_draft_tokens + 1)).astype(jnp.int32)
        return jnp.minimum(number, inputs.num_drafts), state

    return policies.from_function(decide, name="random decision table")


@pytest.mark.parametrize("shape", [Shape(2, 2, 1, 3, 500), Shape(2, 3, 1, 3, 100), Shape(2, 2, 2, 2, 30)])
def test_any_function_of_all_draws_is_exact_under_the_deferred_rule_alone(shape):
    policy = random_decision_table(shape.num_draft_tokens)
    draft, target, prompts = random_models(3, shape)
    for rule in RULES:
        output = exact_output_law(
            policy,
            draft,
            target,
            rule=rule,
            num_draft_tokens=shape.num_draft_tokens,
            num_tokens=shape.num_tokens,
            prompts=prompts,
            num_requests=shape.num_requests,
        )
        distance = total_variation(output)
        if rule == "deferred":
            assert distance.max() < EXACT
        else:  # nearly every table bends the law of nearly every model
            assert np.median(distance) > BENT and distance.max() > 0.1, distance


def agrees(finding, verdict):
    """What a search reports, held against the exact law's verdict."""
    if verdict == E:
        return finding.passed
    if verdict == J:
        return finding.marginal is None and finding.joint is not None
    return finding.scheme is not None or (finding.marginal is not None and finding.joint is not None)


@every
def test_the_search_agrees_with_the_exact_law(name):
    for rule in ("standard", "coupled", "deferred"):
        finding = check_non_anticipating(policy_of(name, 4, 3), **given(name, rule, 4, 3))
        assert agrees(finding, expected(name, rule)), str(finding)


@pytest.mark.slow
@every
def test_the_search_finds_every_leak_in_20_of_20_seeds(name):
    for rule in RULES:
        leaks = expected(name, rule) != E
        for seed in range(20) if leaks else (0,):
            finding = check_non_anticipating(policy_of(name, 64, 8), **given(name, rule, 64, 8), seed=seed)
            assert agrees(finding, expected(name, rule)), (seed, str(finding))


def assert_certificate(name, rule, certificate):
    verdict = expected(name, rule)
    if rule in PROVED.get(name, ()):
        assert certificate.marginal == certificate.joint == "proved", str(certificate)
    if verdict == X:  # no leak is ever proved lossless, and nothing lossless is called a leak
        assert certificate.marginal != "proved" and certificate.joint != "proved", str(certificate)
    elif verdict == J:
        assert certificate.marginal != "leak" and certificate.joint != "proved", str(certificate)
    else:
        assert certificate.marginal != "leak" and certificate.joint != "leak", str(certificate)


@every
def test_certificates_agree_with_the_exact_law(name):
    for rule in RULES:
        assert_certificate(name, rule, certify(policy_of(name, 4, 3), **given(name, rule, 4, 3)))


@pytest.mark.slow
@every
def test_certificates_at_production_shapes(name):
    for rule in RULES:
        assert_certificate(name, rule, certify(policy_of(name, 64, 8), **given(name, rule, 64, 8)))


@pytest.mark.parametrize(("rule", "depends_on"), [
    ("standard", "prefix"), ("coupled", "prefix"), ("coupled", "draw"),
])  # fmt: skip
def test_the_trimmer_is_proved_at_production_shapes(rule, depends_on):
    policy = policies.trimmer(rising_costs(64, 8))
    certificate = certify(policy, rule=rule, num_requests=64, num_draft_tokens=8, acceptance_depends_on=depends_on)
    assert certificate.marginal == certificate.joint == "proved", str(certificate)
    policies.require_lossless(policy, rule, depends_on)
    if depends_on == "draw":
        with pytest.raises(ValueError, match=r"trimmer.*not lossless under the standard rule"):
            policies.require_lossless(policy, "standard", depends_on)


def test_declarations_agree_with_the_exact_law():
    """What a policy declares of itself never promises more than the law keeps (schemes apart: no policy can know)."""
    for name, verdicts in EXPECTED.items():
        practice = PRACTICES[name]
        if all(v == X for v in verdicts):
            continue
        for rule, verdict in zip(RULES, verdicts, strict=True):
            declared = policies.verdict(
                practice.policy(4, 3),
                acceptance_depends_on=practice.acceptance_depends_on,
                drafter=practice.scheme.drafter,
            )
            assert (rule in declared.marginal) == (verdict != X), (name, rule)
            assert (rule in declared.joint) == (verdict == E), (name, rule)


def test_the_table_is_written(tmp_path, capsys):
    losslessness.main(["--out", str(tmp_path), "--only", "drawn q, discarding", "--requests", "4", "--drafts", "3"])
    printed = capsys.readouterr().out
    row = next(line for line in printed.splitlines() if line.startswith("| threshold on drawn q"))
    standard, coupled, deferred = row.split("|")[4:7]
    assert "leak" in standard and "0 (proved)" in coupled and "0 (proved)" in deferred
    assert {p.name for p in tmp_path.iterdir()} == {f"losslessness.{end}" for end in ("md", "json", "png")}
