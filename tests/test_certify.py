"""Certificates: what is proved, what leaks, what stays undecided, and that nothing false is ever proved."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specav import policies
from specav.costs import cost_table
from specav.lossless._same_program import same_program
from specav.lossless.anticipation import Finding
from specav.lossless.certify import Certificate, certify
from specav.lossless.scheme import Scheme, sampled_with
from specav.policies import Admission, by_admission, from_function
from specav.sampling import SamplingParams

module = importlib.import_module("specav.lossless.certify")  # the package exports the function of that name
COSTS = cost_table([4, 6, 8, 12], [1.0, 1.2, 1.7, 2.6])
SMALL = {"num_requests": 3, "num_draft_tokens": 4}
PROVED, UNDECIDED = ("proved", "proved"), ("not decided", "not decided")


def user(count):
    return from_function(lambda state, inputs: (count(inputs), state))


def judged(policy, rule, **options) -> Certificate:
    return certify(policy, rule=rule, **{**SMALL, **options})


def verdicts(certificate):
    return certificate.marginal, certificate.joint


@pytest.fixture
def no_search(monkeypatch):
    """Replaces the search for counterexamples by one that finds none: what is then proved, is proved by analysis."""

    def nothing_found(policy, *, rule, drafter, **sizes):
        return Finding(policy.name, rule, drafter.drafter, None, None, None, 7, 3, 4)

    monkeypatch.setattr(module, "check_non_anticipating", nothing_found)


def passed(inputs):
    return inputs.features.logit_q_max > 0


leading = lambda mask: jnp.cumprod(mask, axis=1).sum(axis=1)  # noqa: E731

PROVABLE = {
    "everything": (policies.everything(), "standard", {}),
    "nothing": (policies.nothing(), "standard", {}),
    "fixed": (policies.fixed(2), "standard", {}),
    "max q": (policies.threshold("logit_q_max", 0.0), "standard", {}),
    "entropy": (policies.threshold("entropy", 0.5), "coupled", {}),
    "drawn q": (policies.threshold("logit_q_sampled", 0.0), "coupled", {}),
    "drawn q of a parallel drafter": (
        policies.threshold("logit_q_sampled", 0.0), "coupled", {"drafter": "parallel"}
    ),
    "drawn q of point masses": (policies.threshold("logit_q_sampled", 0.0), "standard", {"drafter": "point_mass"}),
    "survival": (policies.survival_threshold(0.3), "standard", {}),
    "survival of the drawn": (policies.survival_threshold(0.3), "coupled", {"acceptance_depends_on": "draw"}),
    "stop after the drawn": (policies.stop_after("logit_q_sampled", 0.0), "standard", {}),
    "confidence": (policies.confidence_stop(), "standard", {}),
    "adaptive": (policies.draft_and_verify(), "standard", {}),
    "trimmer": (policies.trimmer(COSTS), "standard", {}),
    "trimmer, pairwise": (policies.trimmer(COSTS, method="pairwise"), "standard", {}),
    "trimmer of the drawn": (policies.trimmer(COSTS), "coupled", {"acceptance_depends_on": "draw"}),
    "tetris": (policies.tetris(5), "coupled", {}),
    "live, parallel laws": (policies.live_argmax(COSTS), "standard", {"drafter": "parallel"}),
    "live, deferred": (policies.live_argmax(COSTS), "deferred", {}),
    "all or nothing up to one law ahead": (
        policies.clear_short(policies.threshold("logit_q_max", 0.0), 2), "coupled", {}
    ),
    "user: product": (user(lambda i: leading(passed(i))), "standard", {}),
    "user: ten lines": (
        user(lambda i: jnp.where(i.active, jnp.minimum(leading(passed(i)) + 1, i.num_drafts), 0)), "standard", {}
    ),
    "user: tokens": (user(lambda i: leading(i.draft_tokens != 3)), "coupled", {}),
    "user: first laws of all": (
        user(lambda i: leading(i.features.entropy < i.features.entropy[:, :1].mean())), "standard", {}
    ),
    "user: the past": (user(lambda i: jnp.minimum(i.last_accepted + 1, i.last_tested)), "standard", {}),
    "user: one law ahead": (user(lambda i: leading(passed(i)[:, 1:])), "coupled", {}),
}  # fmt: skip


@pytest.mark.usefixtures("no_search")
@pytest.mark.parametrize("name", PROVABLE)
def test_proved(name):
    policy, rule, options = PROVABLE[name]
    found = judged(policy, rule, **options)
    assert verdicts(found) == PROVED, str(found)
    assert str(found).startswith(f"proved lossless under the {rule} rule (marginal and joint): ")


def hidden(inputs, through):
    """Whether draft 1 is verified by the law of position 2, hidden from sight; the others never are."""
    flag = through(inputs.features.logit_q_max)
    return jnp.where(flag, jnp.minimum(inputs.num_drafts, 1), 0)


def by_while(x):
    return (
        jax.lax.while_loop(
            lambda c: c[1] < 2, lambda c: (c[0] * 2.0, c[1] + 1 + (c[0][0] > 0).astype(int)), (x[:, 1], 0)
        )[0]
        > 0
    )


def counted(x):
    start = (x[:, 0] > -1e9).astype(jnp.int32)
    return jnp.take_along_axis(x, start[:, None], axis=1)[:, 0] > 0


LEAKY = {
    "sort": lambda x: jnp.sort(x, axis=1)[:, 2] > 0,
    "argsort": lambda x: jnp.argsort(x, axis=1)[:, 0] == 2,
    "top_k": lambda x: jax.lax.top_k(x, 2)[0][:, 1] > 0,
    "while": by_while,
    "scan": lambda x: jax.lax.scan(lambda c, y: (jnp.maximum(c, y), None), x[:, 0], x.T)[0] > 0,
    "gather": counted,
    "cond": lambda x: jax.lax.cond(x[0, 1] > 0, lambda: jnp.ones(3, bool), lambda: jnp.zeros(3, bool)),
    "times zero": lambda x: jnp.isnan(x[:, 1] * 0.0),
    "minus itself": lambda x: (x - x)[:, 1] != 0,
    "not itself": lambda x: (x != x)[:, 1],
    "a zero weight": lambda x: jnp.isnan(x @ jnp.asarray([1.0, 0.0, 0.0, 0.0])),
    "bits": lambda x: jax.lax.bitcast_convert_type(x, jnp.int32)[:, 1] > 0,
    "division": lambda x: jnp.isinf(1.0 / x[:, 1]),
    "a mask in memory": lambda x: jnp.where(jnp.arange(4)[None] == 1, x, 0.0).sum(axis=1) > 0,
    "scatter": lambda x: jnp.zeros(3).at[jnp.arange(3)].set(x[:, 1]) > 0,
    "callback": lambda x: jax.pure_callback(lambda: np.ones(3, bool), jax.ShapeDtypeStruct((3,), jnp.bool_)),
    "jit": lambda x: jax.jit(lambda y: jax.nn.relu(y)[:, 1] > 0)(x),
}


@pytest.mark.usefixtures("no_search")
@pytest.mark.parametrize("name", LEAKY)
def test_nothing_hides_from_the_analysis(name):
    found = judged(user(lambda i: hidden(i, LEAKY[name])), "standard")
    assert verdicts(found) == UNDECIDED, str(found)
    if name in ("sort", "top_k", "while", "gather", "cond"):
        assert f"because of primitive {name}" in str(found)
    elif name == "callback":
        assert "because of primitive pure_callback" in str(found)
    else:
        assert "reads logit_q_max of draft" in str(found) or "because of primitive" in str(found)


NOT_PROVABLE = {
    "drawn q, standard": (policies.threshold("logit_q_sampled", 0.0), "standard", {}),
    "drawn q of a parallel drafter": (
        policies.threshold("logit_q_sampled", 0.0), "standard", {"drafter": "parallel"}
    ),
    "estimator of the drawn": (policies.threshold("acceptance", 0.5), "standard", {"acceptance_depends_on": "draw"}),
    "survival of the drawn": (policies.survival_threshold(0.3), "standard", {"acceptance_depends_on": "draw"}),
    "live": (policies.live_argmax(COSTS), "coupled", {}),
    "next law": (user(lambda i: leading(passed(i)[:, 1:])), "standard", {}),
    "second law ahead": (user(lambda i: leading(passed(i)[:, 2:])), "coupled", {}),
    "next token": (user(lambda i: leading(i.draft_tokens[:, 1:] != 3)), "coupled", {}),
    "all or nothing": (policies.clear_short(policies.threshold("logit_q_max", 0.0), 2), "standard", {}),
    "all or nothing, longer": (policies.clear_short(policies.threshold("logit_q_max", 0.0), 3), "coupled", {}),
    "all passed": (user(lambda i: jnp.where(passed(i).all(axis=1), i.num_drafts, 0)), "coupled", {}),
    "block mean": (policies.mean_threshold("logit_q_max", 0.0), "standard", {}),
    "number that pass": (user(lambda i: passed(i).sum(axis=1)), "standard", {}),
    "tetris, standard": (policies.tetris(5), "standard", {}),
}  # fmt: skip


@pytest.mark.usefixtures("no_search")
@pytest.mark.parametrize("name", NOT_PROVABLE)
def test_not_proved(name):
    policy, rule, options = NOT_PROVABLE[name]
    found = judged(policy, rule, **options)
    assert verdicts(found) == UNDECIDED, str(found)


# Other requests: the marginal law is safe, the joint law is not.


@pytest.mark.usefixtures("no_search")
@pytest.mark.parametrize(
    "count",
    [
        lambda i: leading(i.features.logit_q_max > i.features.logit_q_max[::-1].at[1].set(0.0)),
        lambda i: jnp.where(jnp.roll(i.draft_tokens[:, 0], 1) == 0, i.num_drafts, 0),
        lambda i: jnp.minimum(i.num_drafts, jnp.roll(leading(passed(i)), 1)),
    ],
)
def test_what_other_requests_draw_bends_the_joint_law_only(count):
    found = judged(user(count), "standard")
    assert verdicts(found) == ("proved", "not decided")
    assert "each request's own law: proved: no decision" in str(found) and "joint law of the batch: not dec" in str(
        found
    )


@pytest.mark.usefixtures("no_search")
def test_pairwise_allocation_is_proved_for_each_request_by_its_code_alone():
    for rule, depends in (("standard", "prefix"), ("coupled", "draw")):
        policy = policies.trimmer(COSTS, method="pairwise")._replace(admission=None)
        found = judged(policy, rule, acceptance_depends_on=depends)
        assert verdicts(found) == ("proved", "not decided")
    found = judged(policies.trimmer(COSTS)._replace(admission=None), "standard")
    assert verdicts(found) == UNDECIDED and "because of primitive sort" in str(found)


# Admissions are checked, not believed.


def admitting(scores, budget=lambda state, inputs: jnp.int32(3), **options):
    def admission(state, inputs):
        return Admission(scores(inputs), budget(state, inputs)), state

    return by_admission("user", admission, window="causal", reads=(), **options)


causal = lambda i: jnp.cumsum(i.features.logit_q_max, axis=1)  # noqa: E731

ADMISSIONS = {
    "causal scores": (admitting(causal), ""),
    "pairwise": (admitting(causal, method="pairwise"), ""),
    "first laws of all": (admitting(lambda i: causal(i) + i.features.entropy[:, :1].sum()), ""),
    "a budget of the past": (admitting(causal, lambda s, i: i.last_accepted.sum(dtype=jnp.int32)), ""),
    "a budget of first laws": (admitting(causal, lambda s, i: (i.survival[:, 0] > 0.5).sum(dtype=jnp.int32)), ""),
    "derivatives inside": (admitting(lambda i: jax.nn.relu(causal(i))), ""),
    "a live budget": (
        admitting(causal, lambda s, i: (i.survival > 0.5).sum(dtype=jnp.int32)), "its budget reads survival"
    ),
    "scores that look ahead": (admitting(lambda i: jnp.roll(causal(i), -1, axis=1)), "its scores do not go by"),
    "scores of others": (admitting(lambda i: causal(i) + jnp.roll(causal(i), 1, axis=0)), "its scores do not go by"),
    "scores of the drawn": (admitting(lambda i: i.features.logit_q_sampled), "its scores do not go by"),
    "another decision": (
        policies.live_argmax(COSTS)._replace(admission=admitting(causal).admission), "its decision is not the one"
    ),
    "a shifted decision": (
        admitting(causal)._replace(decide=lambda s, i: (admitting(causal).decide(s, i)[0] + 1, s)),
        "its decision is not the one",
    ),
    "another constant": (
        admitting(causal, lambda s, i: jnp.int32(4))._replace(admission=admitting(causal).admission),
        "its decision is not the one",
    ),
}  # fmt: skip


@pytest.mark.usefixtures("no_search")
@pytest.mark.parametrize("name", ADMISSIONS)
def test_admissions(name):
    policy, why_not = ADMISSIONS[name]
    found = judged(policy, "standard")
    if why_not:
        assert found.joint == "not decided" and why_not in found.joint_reason, str(found)
    else:
        assert verdicts(found) == PROVED, str(found)


@pytest.mark.usefixtures("no_search")
def test_declarations_are_not_believed():
    leaky = policies.threshold("logit_q_sampled", 0.0)
    innocent = leaky._replace(window="past", reads=(), couples="none", slots=policies.fixed(1).slots)
    assert verdicts(judged(innocent, "standard")) == UNDECIDED
    modest = policies.nothing()._replace(window="block", reads=("draft_tokens",), couples="live")
    assert verdicts(judged(modest, "standard")) == PROVED


@pytest.mark.usefixtures("no_search")
def test_policies_that_cannot_be_traced_are_not_decided():
    found = judged(user(lambda i: i.num_drafts if i.num_drafts[0] > 0 else i.num_drafts * 0), "standard")
    assert verdicts(found) == UNDECIDED and "cannot be traced" in str(found)
    found = judged(policies.trimmer(COSTS, axis_name="d"), "standard")
    assert verdicts(found) == UNDECIDED and "cannot be traced" in str(found)


# Leaks, with the counterexample.


@functools.cache
def leak():
    return certify(policies.threshold("logit_q_sampled", 0.0), rule="standard", num_requests=2, num_draft_tokens=3)


def test_leaks_come_with_a_counterexample():
    found = leak()
    assert verdicts(found) == ("leak", "leak") and not found.proved
    assert str(found).startswith("leak: whether draft ")
    assert " is verified reads logit_q_sampled of draft " in str(found) and "the standard rule reveals" in str(found)


def test_a_joint_leak_is_not_one_of_each_request():
    policy = user(lambda i: jnp.where(jnp.roll(i.draft_tokens[:, 0], 1) == 0, i.num_drafts, 0))
    found = certify(policy, rule="standard", num_requests=2, num_draft_tokens=2)
    assert verdicts(found) == ("proved", "leak")
    assert "reads draft_tokens of draft 1 of request" in found.joint_reason


def test_a_faulty_scheme_is_a_leak_whatever_the_policy():
    top_k = Scheme(tested=sampled_with(SamplingParams(1.0, 2)), name="top-k when testing only")
    for rule in ("standard", "coupled", "deferred"):
        found = judged(policies.everything(), rule, drafter=top_k)
        assert verdicts(found) == ("leak", "leak") and str(found).startswith("leak: top-k when testing only")
    warm = Scheme(drawn=sampled_with(SamplingParams(0.5)), name="warm drafts")
    assert verdicts(judged(policies.everything(), "standard", drafter=warm)) == PROVED


@pytest.mark.parametrize("rule", policies.RULES)
def test_no_certificate_contradicts_a_true_declaration(rule):
    """What the library declares not to be lossless under a rule is never proved, in the marginal or the joint law."""
    for policy, _, options in (*PROVABLE.values(), *NOT_PROVABLE.values()):
        declared = policies.verdict(
            policy,
            acceptance_depends_on=options.get("acceptance_depends_on", "prefix"),
            drafter=options.get("drafter", "autoregressive"),
        )
        if policy.name.startswith(("user", "clear_short")) or (rule in declared.marginal and rule in declared.joint):
            continue
        reads = judged_without_search(policy, rule, **options)
        assert rule in declared.marginal or reads.marginal != "proved", policy.name
        assert rule in declared.joint or reads.joint != "proved", policy.name


def judged_without_search(policy, rule, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "check_non_anticipating", lambda p, **k: Finding("", "", "", None, None, None, 1, 1, 1))
        return judged(policy, rule, **options)


# Programs compared.


def test_programs_are_compared_to_the_bit():
    trace = lambda f: jax.make_jaxpr(f)(jnp.zeros((2, 3)), jnp.ones((2, 3)))  # noqa: E731
    table = np.arange(3, dtype=np.float32)[None]

    def base(x, y):
        return jax.jit(lambda z: jax.nn.relu(z) * table)(x - y)

    assert same_program(trace(base), trace(lambda a, b: base(a, b)))
    other = np.asarray([[0, 1, 2.0000002]], np.float32)
    for different in (
        lambda x, y: jax.jit(lambda z: jax.nn.relu(z) * table)(y - x),
        lambda x, y: jax.jit(lambda z: jax.nn.relu(z) * other)(x - y),
        lambda x, y: jax.jit(lambda z: jax.nn.elu(z) * table)(x - y),
        lambda x, y: base(x, y) + 0.0,
        lambda x, y: (base(x, y), x),
    ):
        assert not same_program(trace(base), trace(different))
    assert not same_program(trace(lambda x, y: x.sum(axis=1)), trace(lambda x, y: x.sum(axis=0)))
    assert not same_program(trace(lambda x, y: x + 1e-8), trace(lambda x, y: x + 1.1e-8))
    scan = lambda n: trace(lambda x, y: jax.lax.scan(lambda c, _: (c * 2, None), x, None, length=n)[0])  # noqa: E731
    assert same_program(scan(3), scan(3)) and not same_program(scan(3), scan(4))


@pytest.mark.usefixtures("own_checks")
def test_errors():
    with pytest.raises(ValueError, match="rule: expected one of 'standard'"):
        certify(policies.nothing(), rule="greedy")
    with pytest.raises(ValueError, match="acceptance_depends_on: expected one of"):
        certify(policies.nothing(), rule="standard", acceptance_depends_on="block")
    with pytest.raises(ValueError, match="drafter: expected one of"):
        certify(policies.nothing(), rule="standard", drafter="tree")
    with pytest.raises(ValueError, match="num_requests: expected an int of at least 1"):
        certify(policies.nothing(), rule="standard", num_requests=0)
