"""The monitor: valid by enumeration, quiet on exact decoders, quick on leaking ones."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from specav import policies
from specav.decode import decoder
from specav.drafting import autoregressive_drafter, point_mass_drafter
from specav.lossless import monitor as module
from specav.lossless.monitor import Bet, discarding_law, lossless_monitor, round_evidence
from tests.helpers import assert_stays_on_device, bigram_model, count_traces

MONITOR = lossless_monitor(0.01)
UPDATE = jax.jit(MONITOR.update)
SIZE = 5


def normalised(weights):
    weights = np.asarray(weights, np.float64)
    return (weights / weights.sum(axis=-1, keepdims=True)).astype(np.float32)


def pairs_of_laws(size=SIZE):
    """Two float32 laws [size] with zeros, point masses and extreme ratios among them."""
    weights = st.one_of(st.just(0.0), st.floats(1e-6, 1.0), st.sampled_from([1e-30, 1e-3, 1.0]))
    rows = hnp.arrays(np.float64, (2, size), elements=weights)
    return rows.filter(lambda x: (x.sum(axis=1) > 1e-3).all()).map(normalised)


def exact(p):
    """The law that a float32 row stands for."""
    return np.asarray(p, np.float64) / np.asarray(p, np.float64).sum(axis=-1, keepdims=True)


@functools.cache
def one_step(stake):
    """Wealth relative to the start after each possible token [V], of every bet at one stake."""
    monitor = lossless_monitor(stakes=(stake,))

    @jax.jit
    def run(p, q):
        state = monitor.init()
        after = jax.vmap(lambda y: monitor.update(state, p[None], q[None], y[None]))(jnp.arange(len(p)))
        released = (state.reserve - after.reserve)[:, None] / len(monitor.bets)
        return (after.wealth - released) / state.wealth[None, :]

    return run


@given(pairs_of_laws(), st.sampled_from([0.9, 0.25, -0.25, -0.9]))
def test_no_bet_is_worth_more_than_it_costs(laws, stake):
    p, q = laws
    e = np.asarray(one_step(stake)(p, q), np.float64)
    possible = p > 0
    assert (e[possible] > 0.09).all() and (e[possible] < 1.91).all()
    expected = exact(p) @ np.where(possible[:, None], e, 0.0)
    assert (expected <= 1 + 2e-7).all(), expected - 1  # 2e-7: reading wealth off in float32
    assert (expected >= 1 - 1e-5).all(), expected - 1  # and little is given away


@pytest.mark.parametrize("size", [300, 2048])
def test_rounding_over_a_large_vocabulary_never_pays(size):
    """E g in float64 of the float32 scores, against what is taken off."""
    rng = np.random.default_rng(size)
    scale = np.asarray([0.5, 2.0, 8.0])[:, None]
    z = rng.normal(size=(3, size)) * scale
    p, q = normalised(np.exp(z)), normalised(np.exp(z + rng.normal(size=z.shape)))
    cuts = np.asarray([1e-6, 1e-4, 1e-3, 1e-2, 0.1], np.float32)

    @jax.jit
    def scores(p, q):
        laws = (jnp.broadcast_to(x[None], (size, size)) for x in (p, q))
        return module._scores(*laws, jnp.arange(size), jnp.ones((size,), jnp.bool_), cuts)[0]

    for p_row, q_row in zip(p, q, strict=True):
        score = np.asarray(scores(p_row, q_row), np.float64)
        assert np.abs(score).max() <= 1 + 1e-6
        assert np.abs(exact(p_row) @ score).max() < 0.25 * module._SLACK


def test_ville_holds_on_every_path():
    """All 2^12 token sequences of a two-letter target, with their exact probabilities."""
    monitor, length = lossless_monitor(0.4, thresholds=(0.0,), stakes=(0.9,)), 12
    rng = np.random.default_rng(0)
    p, q = normalised(rng.uniform(0.3, 1, (length, 2))), normalised(rng.uniform(0.02, 1, (length, 2)))
    paths = np.asarray(list(itertools.product(range(2), repeat=length)), np.int32)

    @jax.jit
    @jax.vmap
    def run(path):
        def one(state, row):
            state = monitor.update(state, *(x[None] for x in row))
            return state, state.total

        return jax.lax.scan(one, monitor.init(), (jnp.asarray(p), jnp.asarray(q), path))

    state, totals = run(jnp.asarray(paths))
    mass = np.prod(exact(p)[np.arange(length), paths], axis=1)
    assert mass.sum() == pytest.approx(1, abs=1e-12)
    means = mass @ np.asarray(totals, np.float64)
    assert (means <= 1 + 1e-6).all() and means[-1] > 0.999  # a martingale, up to what is taken off
    alarms = mass @ np.asarray(state.alarm)
    assert 0.02 < alarms <= 0.4
    np.testing.assert_array_equal(np.asarray(state.alarm), np.asarray(totals).max(axis=1) >= 2.5)
    np.testing.assert_array_equal(np.asarray(state.maximum), np.maximum(np.asarray(totals).max(axis=1), 1))


def by_enumeration(p, q, discard):
    """The law of a discarding decoder, draft by draft."""
    out = np.zeros_like(p)
    residual = np.maximum(p - q, 0)
    for x in range(len(p)):
        out += q[x] * discard[x] * p
        accept = min(1.0, p[x] / q[x]) if q[x] else 0.0
        kept = q[x] * (1 - discard[x])
        out[x] += kept * accept
        if kept * (1 - accept) > 0:
            out += kept * (1 - accept) * residual / residual.sum()
    return out


@functools.cache
def scores_of_one_threshold():
    @jax.jit
    def run(p, q, cut):
        every = jnp.arange(SIZE)
        laws = (jnp.broadcast_to(x[None], (SIZE, SIZE)) for x in (p, q))
        score = module._scores(*laws, every, jnp.ones((SIZE,), jnp.bool_), cut[None])[0][:, 0]
        return score, discarding_law(p, q, (q < cut).astype(jnp.float32))

    return run


@given(pairs_of_laws(), st.floats(-6, 6))
def test_the_bet_is_the_likelihood_ratio_of_its_leak(laws, threshold):
    p, q = (exact(row) for row in laws)
    cut = np.float32(1 / (1 + np.exp(-threshold)))
    law = by_enumeration(p, q, (laws[1] < cut).astype(np.float64))
    score, stated = scores_of_one_threshold()(*laws, cut)
    np.testing.assert_allclose(np.asarray(stated), law, atol=2e-6)
    np.testing.assert_allclose(p * (1 + np.asarray(score)), law, atol=2e-6)


def test_discarding_by_a_coin_changes_nothing_and_the_known_counterexample_is_right():
    p, q = jnp.asarray([0.5, 0.5]), jnp.asarray([0.2, 0.8])
    np.testing.assert_allclose(discarding_law(p, q, jnp.full((2,), 0.3)), [0.5, 0.5], atol=1e-7)
    np.testing.assert_allclose(discarding_law(p, q, jnp.asarray([1.0, 0.0])), [0.4, 0.6], atol=1e-7)


# ------------------------------------------------------------------------------------------ rows that are not fed


LAWS = normalised(np.random.default_rng(4).uniform(0.1, 1, (2, 6, SIZE)))
TOKENS = np.asarray([0, 1, 2, 3, 4, 0], np.int32)


def fed(p=LAWS[0], q=LAWS[1], tokens=TOKENS, mask=None):
    mask = np.ones(6, bool) if mask is None else mask
    return UPDATE(MONITOR.init(), jnp.asarray(p), jnp.asarray(q), jnp.asarray(tokens), jnp.asarray(mask))


def test_rows_without_a_law_or_a_token_are_skipped():
    keep = np.asarray([True, True, False, True, True, False])
    p, q, tokens = LAWS[0].copy(), LAWS[1].copy(), TOKENS.copy()
    wanted = fed(mask=keep)
    assert wanted.num_tokens == 4
    q[2], p[5] = 0.0, np.nan
    broken = fed(p, q)
    tokens[2], tokens[5] = -1, SIZE
    padded = fed(tokens=tokens)
    q[2, 0], p[5] = np.nan, 2 * LAWS[0, 5]
    scaled = fed(p, q)
    for state in (broken, padded, scaled):
        assert state.num_tokens == 4 and state.num_impossible == 0
        np.testing.assert_array_equal(np.asarray(state.wealth), np.asarray(wanted.wealth))


def test_nothing_fed_changes_nothing():
    state = fed(mask=np.zeros(6, bool))
    for new, old in zip(state, MONITOR.init(), strict=True):
        np.testing.assert_allclose(np.asarray(new), np.asarray(old), rtol=1e-6)
    assert not state.alarm


def test_an_impossible_token_raises_the_alarm():
    p = LAWS[0].copy()
    p[3] = [0.25, 0.25, 0.25, 0.0, 0.25]
    state = fed(p)
    assert state.alarm and state.num_impossible == 1 and state.num_tokens == 5
    assert np.isfinite(np.asarray(state.wealth)).all()
    assert not fed(p, mask=TOKENS != 3).alarm


def test_rows_may_come_in_any_order_and_shape():
    order = np.random.default_rng(0).permutation(6)
    state, shuffled = fed(), fed(LAWS[0][order], LAWS[1][order], TOKENS[order])
    np.testing.assert_allclose(np.asarray(shuffled.wealth), np.asarray(state.wealth), rtol=1e-5)
    blocks = (jnp.asarray(x).reshape(2, 3, *x.shape[1:]) for x in (*LAWS, TOKENS))
    blocked = UPDATE(MONITOR.init(), *blocks)
    np.testing.assert_allclose(np.asarray(blocked.wealth), np.asarray(state.wealth), rtol=1e-5)


def test_wealth_is_neither_made_nor_lost_beside_the_bets():
    """With p = q every bet is worth 1: what leaves the reserve arrives, and n tokens leave C / (C + n) of it."""
    rows, tokens = jnp.full((6, SIZE), 1 / SIZE, jnp.float32), jnp.asarray(TOKENS)

    @jax.jit
    def run():
        step = lambda state, _: (MONITOR.update(state, rows, rows, tokens), None)  # noqa: E731
        return jax.lax.scan(step, MONITOR.init(), length=500)[0]

    state = run()
    assert state.num_tokens == 3000 and not state.alarm
    assert float(state.reserve) == pytest.approx(0.5 * 1000 / (1000 + 3000), rel=1e-4)
    assert 1 - 3000 * module._SLACK <= float(state.total) <= 1


def test_extreme_wealth_stays_finite():
    p, q = (np.tile(row, (5000, 1)) for row in normalised([[0.5, 0.5], [0.05, 0.95]]))
    states = []
    for token in (0, 1):
        state = MONITOR.init()
        for _ in range(3):
            state = UPDATE(state, p, q, np.full(5000, token, np.int32))
        states.append(state)
        assert all(np.isfinite(np.asarray(leaf, np.float64)).all() for leaf in state)
        assert state.alarm  # 5000 equal tokens of a fair coin, either way
    assert MONITOR.bets[int(states[1].wealth.argmax())].stake > 0 > MONITOR.bets[int(states[0].wealth.argmax())].stake


def test_it_compiles_once_and_stays_on_the_device():
    update, traces = count_traces(MONITOR.update)
    state = MONITOR.init()
    sizes = [leaf.shape for leaf in state]
    for _ in range(3):
        state = update(state, *map(jnp.asarray, (*LAWS, TOKENS)))
    assert len(traces) == 1 and [leaf.shape for leaf in state] == sizes
    assert_stays_on_device(MONITOR.update, state, *map(jnp.asarray, (*LAWS, TOKENS)))
    assert len(state.wealth) == len(MONITOR.bets) and MONITOR.bets[-1] == Bet(None, -0.75)


@pytest.mark.parametrize(
    ("error", "match", "call"),
    [
        (ValueError, "level", lambda: lossless_monitor(0.0)),
        (ValueError, "level", lambda: lossless_monitor(1.0)),
        (TypeError, "level", lambda: lossless_monitor("x")),
        (ValueError, "thresholds", lambda: lossless_monitor(thresholds=(float("nan"),))),
        (ValueError, "stakes", lambda: lossless_monitor(stakes=(0.5, 0.0))),
        (ValueError, "stakes", lambda: lossless_monitor(stakes=(0.95,))),
        (ValueError, "stakes", lambda: lossless_monitor(stakes=())),
        (ValueError, "draft_probs", lambda: MONITOR.update(MONITOR.init(), LAWS[0], LAWS[1][:, :2], TOKENS)),
        (ValueError, "tokens", lambda: MONITOR.update(MONITOR.init(), LAWS[0], LAWS[1], TOKENS[:3])),
        (TypeError, "mask", lambda: MONITOR.update(MONITOR.init(), LAWS[0], LAWS[1], TOKENS, TOKENS)),
        (TypeError, "tokens", lambda: MONITOR.update(MONITOR.init(), LAWS[0], LAWS[1], LAWS[0][:, 0])),
    ],
)
def test_bad_arguments_are_named(own_checks, error, match, call):
    with pytest.raises(error, match=match):
        call()


# ------------------------------------------------------------------------------------------------ decoders


VOCABULARY, WIDTH = 8, 4
TARGET = np.random.default_rng(1).normal(size=(VOCABULARY, VOCABULARY)) * 1.5
DRAFT = TARGET + np.random.default_rng(2).normal(size=TARGET.shape) * 0.8


def toy_decoder(policy, rule, rounds=1, drafter=None):
    if drafter is None:
        drafter = autoregressive_drafter(bigram_model(jnp.asarray(DRAFT, jnp.float32)), WIDTH)
    return decoder(
        bigram_model(jnp.asarray(TARGET, jnp.float32)),
        drafter,
        num_draft_tokens=WIDTH,
        max_new_tokens=rounds * (WIDTH + 1) + 1,
        policy=policy,
        rule=rule,
        feature_names=("logit_q_sampled",),
        require_lossless=False,
    )


def drawn_threshold():
    """The log-odds that discard half the drafts: the median of running minima over draws of the toy draft model."""
    law = exact(np.exp(DRAFT))
    rng, token = np.random.default_rng(0), np.zeros(20_000, np.int64)
    lowest, minima = np.full(20_000, np.inf), []
    for _ in range(WIDTH):
        cumulative = law[token].cumsum(axis=1)
        following = (rng.random(20_000)[:, None] > cumulative).sum(axis=1)
        q = law[token, following]
        lowest = np.minimum(lowest, np.log(q / (1 - q)))
        minima.append(lowest)
        token = following
    return float(np.median(minima))


@functools.cache
def watched(rule, runs, rounds):
    """`runs` requests, each with a monitor of its own, under a threshold on the drawn token.

    Returns the final monitors, tokens emitted, and the share of drafts that were verified.
    """
    loop = toy_decoder(policies.threshold("logit_q_sampled", drawn_threshold()), rule, rounds)

    @jax.jit
    def run(key):
        start = loop.init(key, jnp.zeros((runs, 1), jnp.int32), jnp.ones((runs,), jnp.int32), (), ())
        monitors = jax.tree.map(lambda x: jnp.broadcast_to(x, (runs, *x.shape)), MONITOR.init())

        def one(carry, _):
            state, monitors = carry
            state, info = loop.step(state)
            verified = jnp.sum(info.num_verified) / jnp.sum(info.block.num_drafts)
            return (state, jax.vmap(MONITOR.update)(monitors, *round_evidence(info))), verified

        (state, monitors), verified = jax.lax.scan(one, (start, monitors), length=rounds)
        return monitors, state.positions - 1, jnp.mean(verified)

    return jax.tree.map(np.asarray, run(jax.random.key(3)))


def test_exact_decoders_raise_the_alarm_at_most_at_the_level():
    """2,000 runs of the coupled rule under the very policy that leaks under the standard rule."""
    monitors, emitted, verified = watched("coupled", 2_000, 80)
    assert 0.35 < verified < 0.65 and emitted.mean() > 150
    assert int(monitors.alarm.sum()) <= 37  # binomial(2000, .01), 99.9 %
    assert monitors.num_impossible.sum() == 0
    # The wealth did move: a monitor that bets nothing would pass this test too.
    assert monitors.maximum.max() > 5


def test_a_threshold_on_the_drawn_token_is_seen_under_the_standard_rule():
    monitors, emitted, verified = watched("standard", 200, 400)
    assert 0.35 < verified < 0.65
    assert monitors.alarm.mean() >= 0.9, (monitors.alarm.mean(), emitted.mean())
    best = [MONITOR.bets[i] for i in monitors.wealth[monitors.alarm].argmax(axis=1)]
    assert sum(bet.stake > 0 and bet.threshold is not None for bet in best) >= 0.9 * len(best)


def leaking_tokens(rng, p, law, count):
    """Tokens int32 [count] of rows drawn at random, and the rows."""
    rows = rng.integers(len(p), size=count)
    cumulative = law.cumsum(axis=1)
    return (rng.random(count)[:, None] * cumulative[rows, -1:] > cumulative[rows]).sum(axis=1).astype(np.int32), rows


@functools.cache
def laws_of_contexts():
    rng = np.random.default_rng(5)
    z = rng.normal(size=(200, 32)) * 2
    return normalised(np.exp(z)), normalised(np.exp(z + rng.normal(size=z.shape)))


@jax.jit
def alarm_time(p, q, tokens):
    """Number of rows [N] before the alarm, fed 10 at a time; N if there is none, and the last state."""

    def one(state, chunk):
        state = MONITOR.update(state, *chunk)
        return state, state.alarm

    chunks = jax.tree.map(lambda x: x.reshape(-1, 10, *x.shape[1:]), (p, q, tokens))
    state, alarms = jax.lax.scan(one, MONITOR.init(), chunks)
    return 10 * jnp.sum(~alarms), state


def leaks():
    """Faults of other kinds, as laws of the emitted token."""
    p, q = (row.astype(np.float64) for row in laws_of_contexts())
    overlap, residual = np.minimum(p, q), np.maximum(p - q, 0)
    lenient = np.minimum(1.5 * p, q)
    reverse = p * (1 - 0.5 * (by_rows(p, q, q < 0.05) / p - 1))  # discards likely drafts rather than unlikely ones
    return {
        "drafts are accepted too easily": lenient + (1 - lenient.sum(axis=1, keepdims=True)) * exact(residual),
        "residual drawn from p": overlap + (1 - overlap.sum(axis=1, keepdims=True)) * p,
        "unlikely drafts discarded now and then": 0.6 * p + 0.4 * by_rows(p, q, q < 0.05),
        "the other way round": reverse,
    }


def by_rows(p, q, discard):
    return np.stack([by_enumeration(*rows) for rows in zip(p, q, discard.astype(float), strict=True)])


@pytest.mark.parametrize("name", list(leaks()))
def test_other_faults_are_seen_too(name):
    p, q = laws_of_contexts()
    law = leaks()[name]
    assert law.min() >= 0
    distance = 0.5 * np.abs(law - p).sum(axis=1).mean()
    rng = np.random.default_rng(6)
    times = []
    for _ in range(10):
        tokens, rows = leaking_tokens(rng, p, law, 8_000)
        times.append(int(alarm_time(p[rows], q[rows], tokens)[0]))
    print(f"{name}: total variation {distance:.3f}, tokens to the alarm {sorted(times)}")
    assert sorted(times)[8] < 8_000


def test_a_leak_that_begins_late_is_seen_soon():
    p, q = laws_of_contexts()
    rng = np.random.default_rng(7)
    exact_tokens, exact_rows = leaking_tokens(rng, p, p.astype(np.float64), 20_000)
    early = alarm_time(*(x[:8_000] for x in (p[exact_rows], q[exact_rows], exact_tokens)))
    assert int(early[0]) == 8_000  # no alarm
    law = by_rows(*(x.astype(np.float64) for x in (p, q)), (q < 0.05).astype(float))
    tokens, rows = leaking_tokens(rng, p, law, 4_000)
    rows, tokens = np.append(exact_rows, rows), np.append(exact_tokens, tokens)
    time, state = alarm_time(p[rows], q[rows], tokens)
    print(f"alarm {int(time) - 20_000} tokens after the leak began")
    assert 20_000 < int(time) < 23_000 and state.alarm


def test_evidence_of_a_round_is_what_was_emitted_and_promised():
    laws = {"target": exact(np.exp(TARGET)), "draft": exact(np.exp(DRAFT))}
    runs = 50
    loop = toy_decoder(policies.fixed(2), "standard", 3)
    state = jax.jit(loop.init)(
        jax.random.key(0),
        jnp.zeros((runs, 1), jnp.int32),
        jnp.ones((runs,), jnp.int32),
        (),
        (),
        token_limits=jnp.arange(runs, dtype=jnp.int32) % 7,  # some have no room for drafts, some have ended
    )
    step = jax.jit(lambda s: (lambda new, info: (new, info, round_evidence(info)))(*loop.step(s)))
    for _ in range(3):
        before = np.asarray(state.positions)
        state, info, (p, q, tokens, mask) = step(state)
        after, text = np.asarray(state.positions), np.asarray(state.tokens)
        num_drafts = np.asarray(info.block.num_drafts)
        assert p.shape == q.shape == (runs, WIDTH + 1, VOCABULARY)
        for r in range(runs):
            count = min(after[r] - before[r], num_drafts[r])
            assert np.asarray(mask)[r].tolist() == [i < count for i in range(WIDTH + 1)]
            for i in range(count):
                last, token = text[r, before[r] + i - 1], text[r, before[r] + i]
                assert token == tokens[r, i]
                np.testing.assert_allclose(np.asarray(p)[r, i], laws["target"][last], atol=1e-6)
                np.testing.assert_allclose(np.asarray(q)[r, i], laws["draft"][last], atol=1e-6)


def test_point_masses_are_evidence_too():
    def guess(state, context):
        return jnp.ones((len(context.lengths), WIDTH), jnp.int32), state

    drafter = point_mass_drafter(lambda state, prompts, lengths: state, guess)
    loop = toy_decoder(policies.everything(), "standard", drafter=drafter)

    @jax.jit
    def one():
        state = loop.init(jax.random.key(0), jnp.zeros((6, 1), jnp.int32), jnp.ones((6,), jnp.int32), (), ())
        info = loop.step(state)[1]
        return info, round_evidence(info)

    info, (_, q, _, mask) = one()
    np.testing.assert_array_equal(np.asarray(q)[:, :WIDTH], np.eye(VOCABULARY)[np.ones((6, WIDTH), int)])
    assert (np.asarray(mask).sum(axis=1) == np.minimum(np.asarray(info.num_committed), WIDTH)).all()


@pytest.mark.slow
def test_the_shipped_models_leak_is_caught_and_their_exact_decoding_is_not(tmp_path):
    from experiments import monitor_power

    out = tmp_path / "power.json"
    report = monitor_power.main(["--seeds", "6", "--tokens", "3000", "--exact-tokens", "1500", "--out", str(out)])
    leak, control = report["rows"]["standard rule (leaks)"], report["rows"]["coupled rule (exact)"]
    assert out.exists()
    assert leak["alarm rate"] == 1 and control["alarm rate"] == 0
    assert 0.02 < leak["true total variation, position 1"] < 0.3
    assert control["true total variation, position 1"] < 1e-6
    assert 0.4 < leak["share of drafts discarded"] < 0.6
