"""Labelled drafts: from logits against float64, rounds for replay, and files that survive or are refused."""

import itertools
import json
import os
import sys

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import tests.reference_features as reference
from specav import traces
from specav.estimators import vllm_online
from specav.features import FEATURES, DraftFeatures, stack_features
from specav.labels import Labels, verification_labels
from specav.traces import SCHEMA, LabelledDrafts

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

FLOATS = [name for name, column in SCHEMA.items() if column.dtype == "float32"]
KNOWN = ("p", "a", "alpha")


def identical(left, right):
    """Same columns, dtypes and bits."""
    return all(
        x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
        for x, y in zip(left, right, strict=True)
    )


def make_drafts(num_rows, seed=0):
    """Valid rows with every kind of value."""
    rng = np.random.default_rng(seed)
    columns = {name: rng.standard_normal(num_rows).astype(np.float32) for name in FEATURES}
    columns |= {name: rng.random(num_rows, np.float32) for name in ("q", "p", "a", "alpha")}
    index = np.arange(num_rows, dtype=np.int32)
    columns |= {"request": index // 4 % 3, "round": index // 12, "position": index % 4}
    known = rng.random(num_rows) < 0.8
    for name in KNOWN:
        columns[name][~known] = np.nan
    observed = rng.random(num_rows) < 0.6
    accepted = observed & (rng.random(num_rows) < 0.7)
    return LabelledDrafts(**columns, accepted=accepted, observed=observed, has_target_row=known)


@st.composite
def some_drafts(draw):
    """Arbitrary drafts that keep to the schema: any finite feature, any probability, subnormal and -0.0 included."""
    num_rows = draw(st.integers(0, 12))

    def column(dtype, elements):
        return draw(hnp.arrays(dtype, num_rows, elements=elements, fill=st.nothing()))

    columns = {name: column(np.int32, st.integers(0, 2**31 - 1)) for name in ("request", "round", "position")}
    columns |= {
        name: column(np.float32, st.floats(width=32, allow_nan=False, allow_infinity=False)) for name in FEATURES
    }
    columns |= {name: column(np.float32, st.floats(0, 1, width=32)) for name in ("q", "p", "a", "alpha")}
    columns |= {name: column(np.bool_, st.booleans()) for name in ("accepted", "observed", "has_target_row")}
    columns["accepted"] &= columns["observed"]
    for name in KNOWN:
        columns[name] = np.where(columns["has_target_row"], columns[name], np.float32(np.nan))
    return LabelledDrafts(**columns)


# From logits


def softmax(z):
    z = np.asarray(z, np.float64)
    top = z.max(-1, keepdims=True)
    weights = np.exp(z - np.where(np.isfinite(top), top, 0.0))
    total = weights.sum(-1, keepdims=True)
    return weights / np.where(total > 0, total, 1.0)


def reference_drafts(tokens, draft_logits, target_logits, num_drafts, num_verified, num_accepted, rule):
    """Rows as dicts, in plain loops and float64."""
    rows = []
    for r, b, i in np.ndindex(*tokens.shape):
        if i >= num_drafts[r, b]:
            continue
        x, n = tokens[r, b, i], num_verified[r, b]
        p_law = softmax(target_logits[r, b, i])
        if draft_logits is None:
            q_law = np.eye(len(p_law))[x]
            z = np.where(q_law > 0, 0.0, -np.inf)
        else:
            z = draft_logits[r, b, i]
            q_law = softmax(z)
        tested = n if rule == "standard" else min(n + 1, num_drafts[r, b])
        rows.append(
            {"request": b, "round": r, "position": i, "has_target_row": i <= n}
            | reference.row_features(z, x)
            | {
                "q": q_law[x],
                "p": p_law[x] if i <= n else np.nan,
                "a": (min(1.0, p_law[x] / q_law[x]) if q_law[x] > 0 else 0.0) if i <= n else np.nan,
                "alpha": np.minimum(p_law, q_law).sum() if i <= n else np.nan,
                "observed": i < min(num_accepted[r, b] + 1, tested),
                "accepted": i < num_accepted[r, b],
            }
        )
    return rows


@pytest.mark.parametrize("point_mass", [False, True])
@pytest.mark.parametrize(("num_positions", "vocabulary"), [(3, 4), (1, 5), (2, 1), (1, 1)])
@settings(max_examples=10)
@given(seed=st.integers(0, 2**32 - 1), rule=st.sampled_from(["standard", "coupled", "deferred"]))
def test_from_logits_equals_a_float64_reference(point_mass, num_positions, vocabulary, seed, rule):
    rng = np.random.default_rng(seed)
    shape = (2, 3, num_positions)
    tokens = rng.integers(0, vocabulary, shape)
    draft = (rng.standard_normal((*shape, vocabulary)) * 3).astype(np.float32)
    target = (rng.standard_normal((2, 3, num_positions + 1, vocabulary)) * 3).astype(np.float32)
    if vocabulary > 1:  # masked tokens, some of them drafted; one token at least is left
        draft[..., 1:][rng.random((*shape, vocabulary - 1)) < 0.3] = -np.inf
        target[..., :-1][rng.random((2, 3, num_positions + 1, vocabulary - 1)) < 0.3] = -np.inf
    draft = None if point_mass else draft
    num_drafts = rng.integers(0, num_positions + 1, (2, 3))
    num_verified = rng.integers(0, num_drafts + 1)
    tested = num_verified if rule == "standard" else np.minimum(num_verified + 1, num_drafts)
    counts = {"num_drafts": num_drafts, "num_verified": num_verified, "num_accepted": rng.integers(0, tested + 1)}
    got = traces.from_logits(tokens, draft, target, rule=rule, **counts)
    want = reference_drafts(tokens, draft, target, **counts, rule=rule)
    assert len(got.request) == len(want) == num_drafts.sum()
    traces.validate(got)
    for name in LabelledDrafts._fields:
        column = getattr(got, name)
        expected = np.array([row[name] for row in want], np.float64)
        tolerance = 2e-5 if name in FEATURES else 1e-6 if name in FLOATS else 0
        np.testing.assert_allclose(column.astype(np.float64), expected, rtol=tolerance, atol=tolerance, err_msg=name)


def test_worked_example():
    """Two tokens, q = (.8, .2), p = (.4, .6): a = .5 for the first token and 1 for the second, alpha = .6."""
    q, p = np.log([0.8, 0.2]).astype(np.float32), np.log([0.4, 0.6]).astype(np.float32)
    tokens = np.array([[0, 1, 0, 1], [1, 0, 1, 0]])
    got = traces.from_logits(
        tokens,
        np.broadcast_to(q, (2, 4, 2)),
        np.broadcast_to(p, (2, 4, 2)),
        num_drafts=np.array([4, 3]),
        num_verified=np.array([1, 3]),
        num_accepted=np.array([2, 1]),
        request=np.array([7, 5]),
        round=9,
    )
    known = [True, True, False, False, True, True, True]
    np.testing.assert_array_equal(got.request, [7] * 4 + [5] * 3)
    np.testing.assert_array_equal(got.round, [9] * 7)
    np.testing.assert_array_equal(got.position, [0, 1, 2, 3, 0, 1, 2])
    np.testing.assert_array_equal(got.has_target_row, known)
    np.testing.assert_allclose(got.q, [0.8, 0.2, 0.8, 0.2, 0.2, 0.8, 0.2], rtol=1e-6)
    np.testing.assert_allclose(got.a, [0.5, 1, np.nan, np.nan, 1, 0.5, 1], rtol=1e-6)
    np.testing.assert_allclose(got.alpha, np.where(known, 0.6, np.nan), rtol=1e-6)
    # Feeding one draft tests two; the first request passed both. The second was rejected at its second draft.
    np.testing.assert_array_equal(got.accepted, [True, True, False, False, True, False, False])
    np.testing.assert_array_equal(got.observed, [True, True, False, False, True, True, False])


def test_point_mass_features_are_those_of_a_one_hot_row():
    tokens, target = np.array([[2, 7]]), np.zeros((1, 3, 4), np.float32)
    got = traces.from_logits(tokens, None, target)
    one_hot = np.full((1, 2, 4), -np.inf, np.float32)
    one_hot[0, :, 2] = 0.0
    np.testing.assert_array_equal(got.q, [1.0, 0.0])  # token 7 is none of 4
    np.testing.assert_array_equal(got.p, [0.25, 0.0])
    same = traces.from_logits(tokens, one_hot, target)
    assert identical(got.features, same.features)
    # A greedy drafter's features come from its raw logits, and are handed in.
    mine = DraftFeatures(*(np.full((1, 2), value, np.float32) for value in range(5)))
    given_features = traces.from_logits(tokens, None, target, features=mine)
    assert [float(column[0]) for column in given_features.features] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_verdicts_without_accepts_or_key_are_unobserved():
    got = traces.from_logits(np.zeros((2, 3), np.int32), None, np.zeros((2, 3, 4), np.float32))
    assert not got.observed.any() and not got.accepted.any() and got.has_target_row.all()
    np.testing.assert_allclose(got.a, 0.25)


@pytest.mark.parametrize("rule", ["standard", "coupled", "deferred"])
def test_simulated_verdicts_follow_the_acceptance_probabilities(rule):
    rng = np.random.default_rng(3)
    shape, vocabulary = (40, 50, 3), 4
    draft = rng.standard_normal((*shape, vocabulary)).astype(np.float32)
    tokens = np.argmax(draft + rng.gumbel(size=draft.shape), axis=-1)
    target = rng.standard_normal((*shape, vocabulary)).astype(np.float32)
    num_verified = np.full(shape[:2], 1)
    simulate = lambda seed: traces.from_logits(  # noqa: E731
        tokens, draft, target, num_verified=num_verified, key=jax.random.key(seed), rule=rule
    )
    got = simulate(0)
    assert identical(got, simulate(0)) and not identical(got, simulate(1))
    first, second = got.position == 0, got.position == 1
    assert got.observed[first].all() and not got.observed[got.position == 2].any()
    if rule == "standard":
        assert not got.observed[second].any()
    else:
        np.testing.assert_array_equal(got.observed[second], got.accepted[first])
    # Residuals against a have mean 0 and variance a (1 - a); 5 sigma. Repeated noise from round to round would show.
    for slots in (first, second & got.observed):
        if slots.any():
            residual = got.accepted[slots] - got.a[slots].astype(np.float64)
            scale = np.sqrt(np.sum(got.a[slots] * (1 - got.a[slots])))
            assert abs(residual.sum()) < 5 * scale


def test_rounds_and_requests_have_noise_of_their_own():
    """With one law and one token everywhere only the noise tells them apart."""
    constant = traces.from_logits(
        np.zeros((40, 50, 1), np.int32), None, np.zeros((40, 50, 1, 2), np.float32), key=jax.random.key(2)
    )
    by_round = constant.accepted.reshape(40, 50)
    assert len(np.unique(by_round, axis=0)) == 40 and len(np.unique(by_round, axis=1).T) == 50


def test_end_of_output_hides_later_verdicts():
    got = traces.from_logits(
        np.zeros((1, 4), np.int32),
        None,
        np.zeros((1, 5, 2), np.float32),
        num_accepted=np.array([4]),
        num_labelled=np.array([2]),
    )
    np.testing.assert_array_equal(got.observed, [True, True, False, False])
    np.testing.assert_array_equal(got.accepted, [True, True, False, False])


def test_arrays_of_jax_and_half_precision():
    rng = np.random.default_rng(5)
    tokens, draft = rng.integers(0, 6, (2, 3)), rng.standard_normal((2, 3, 6))
    target = rng.standard_normal((2, 4, 6))
    half = jnp.asarray(draft, jnp.float16), jnp.asarray(target, jnp.bfloat16)
    got = traces.from_logits(jnp.asarray(tokens, jnp.int32), *half)
    same = traces.from_logits(tokens, *(np.asarray(x.astype(jnp.float32)) for x in half))
    for left, right in zip(got, same, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-6)


TOKENS, LOGITS = np.zeros((2, 3), np.int32), np.zeros((2, 3, 4), np.float32)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"draft_tokens": np.zeros((2, 3), np.float32)}, TypeError, "draft_tokens: expected an integer"),
        ({"draft_tokens": np.zeros((3,), np.int32)}, ValueError, "draft_tokens: expected shape"),
        ({"draft_tokens": np.zeros((2, 0), np.int32)}, ValueError, "draft_tokens: expected at least one"),
        ({"draft_logits": np.zeros((2, 3, 5), np.float32)}, ValueError, "draft_logits: expected shape"),
        ({"target_logits": np.zeros((2, 6, 4), np.float32)}, ValueError, "target_logits: expected shape .* 3 or 4"),
        ({"num_drafts": np.array([4, 0])}, ValueError, r"num_drafts: expected 0..3 \(K\), got 4 at \[0\]"),
        ({"num_drafts": np.array([1, 1]), "num_verified": np.array([1, 2])}, ValueError, "num_verified: expected 0..1"),
        ({"num_verified": np.array([0, -1])}, ValueError, "num_verified: .* got -1"),
        (
            {"num_verified": np.array([1, 1]), "num_accepted": np.array([2, 3])},
            ValueError,
            r"num_accepted: expected 0..2 \(tested drafts\), got 3 at \[1\]",
        ),
        ({"num_accepted": np.array([1.0, 1.0])}, TypeError, "num_accepted: expected an integer"),
        ({"num_accepted": np.array([1])}, ValueError, "num_accepted: expected shape"),
        ({"num_accepted": np.array([1, 1]), "key": jax.random.key(0)}, ValueError, "key: expected None"),
        ({"rule": "typical"}, ValueError, "rule: expected one of 'standard'"),
        ({"request": np.array([1, -1])}, ValueError, "request: expected numbers"),
        ({"request": np.array([1, 2**40])}, ValueError, "request: expected numbers"),
        ({"round": np.array([1, 2, 3])}, ValueError, "round: expected shape"),
        ({"features": DraftFeatures(entropy=LOGITS[..., 0])}, TypeError, "features: expected DraftFeatures with all"),
    ],
)
def test_wrong_arguments_are_named(own_checks, arguments, error, words):
    arguments = {"draft_tokens": TOKENS, "draft_logits": LOGITS, "target_logits": LOGITS} | arguments
    with pytest.raises(error, match=words):
        traces.from_logits(**arguments)


# Rounds


def test_rounds_hold_every_draft_in_its_slot():
    rng = np.random.default_rng(8)
    tokens, draft = rng.integers(0, 5, (3, 2, 4)), rng.standard_normal((3, 2, 4, 5)).astype(np.float32)
    target = rng.standard_normal((3, 2, 4, 5)).astype(np.float32)
    num_drafts = np.array([[4, 0], [2, 3], [1, 1]])
    accepted = np.array([[2, 0], [2, 0], [0, 1]])
    drafts = traces.from_logits(tokens, draft, target, num_drafts=num_drafts, num_accepted=accepted)
    shuffled = LabelledDrafts(*(column[::-1] for column in drafts))
    for source in (drafts, shuffled):
        rounds = traces.to_rounds(source, num_positions=5)
        assert rounds.valid.shape == (3, 2, 5)
        np.testing.assert_array_equal(rounds.round, [0, 1, 2])
        np.testing.assert_array_equal(rounds.request, [[0, -1], [0, 1], [0, 1]])
        np.testing.assert_array_equal(rounds.valid, np.arange(5) < num_drafts[..., None])
        labels = verification_labels(jnp.asarray(accepted.reshape(-1)), jnp.asarray(num_drafts.reshape(-1)), 5)
        np.testing.assert_array_equal(rounds.labels.accepted.reshape(-1, 5), labels.accepted)
        np.testing.assert_array_equal(rounds.labels.observed.reshape(-1, 5), labels.observed)
        back = np.asarray(rounds.valid)
        for name in FEATURES:
            np.testing.assert_array_equal(np.asarray(getattr(rounds.features, name))[back], getattr(drafts, name))
            assert not np.asarray(getattr(rounds.features, name))[~back].any()
        np.testing.assert_array_equal(np.asarray(rounds.a)[back], drafts.a)
        np.testing.assert_array_equal(np.asarray(rounds.alpha)[back], drafts.alpha)
        assert np.isnan(np.asarray(rounds.a)[~back]).all() and not np.asarray(rounds.soft_labels.observed)[~back].any()


def test_an_estimator_replayed_from_a_file_is_the_one_that_saw_the_arrays(tmp_path):
    rng = np.random.default_rng(11)
    shape = (250, 4, 3)
    draft = (rng.standard_normal((*shape, 6)) * 2).astype(np.float32)
    target = (draft + rng.standard_normal(draft.shape)).astype(np.float32)
    tokens = np.argmax(draft + rng.gumbel(size=draft.shape), axis=-1)
    num_drafts = rng.integers(1, 4, shape[:2])
    drafts = traces.from_logits(tokens, draft, target, num_drafts=num_drafts, key=jax.random.key(1))
    traces.write_parquet(tmp_path / "drafts.parquet", drafts)
    rounds = traces.to_rounds(traces.read_parquet(tmp_path / "drafts.parquet")[0], num_positions=3)

    estimator = vllm_online(3)

    @jax.jit
    def replay(features, labels):
        def step(state, inputs):
            probs = estimator.predict(state, inputs[0])
            state, info = estimator.step(state, inputs[0], probs, inputs[1])
            return state, (probs, info.refitted)

        return jax.lax.scan(step, estimator.init(), (features, labels))

    state, (probs, refitted) = replay(stack_features(rounds.features, estimator.features), rounds.labels)
    assert int(refitted.sum()) == 2
    # The same from the arrays at hand.
    full = traces.from_logits(tokens, draft, target, key=jax.random.key(1))
    accepted = np.zeros(shape, bool)
    observed = np.zeros(shape, bool)
    accepted[drafts.round, drafts.request, drafts.position] = drafts.accepted
    observed[drafts.round, drafts.request, drafts.position] = drafts.observed
    features = jnp.asarray(full.logit_q_max.reshape(shape))
    other, (other_probs, _) = replay(features, Labels(jnp.asarray(accepted), jnp.asarray(observed)))
    np.testing.assert_array_equal(state.slopes, other.slopes)
    np.testing.assert_array_equal(state.intercepts, other.intercepts)
    valid = np.asarray(rounds.valid)
    np.testing.assert_array_equal(np.asarray(probs)[valid], np.asarray(other_probs)[valid])
    assert float(jnp.max(jnp.abs(state.intercepts + 0.2))) > 0.01  # it has learned something


def test_rounds_refuse_two_drafts_in_a_slot_and_positions_beyond():
    drafts = make_drafts(12)
    twice = traces.concatenate([drafts, LabelledDrafts(*(column[5:6] for column in drafts))])
    with pytest.raises(ValueError, match=r"second one in row 12 \(request 1, round 0, position 1\)"):
        traces.to_rounds(twice)
    with pytest.raises(ValueError, match=r"position: expected 0..2, got 3 in row 3"):
        traces.to_rounds(drafts, num_positions=3)


def test_no_drafts_no_rounds():
    rounds = traces.to_rounds(make_drafts(0), num_positions=4)
    assert rounds.valid.shape == (0, 0, 4) and rounds.request.shape == (0, 0)
    assert traces.to_rounds(make_drafts(0)).valid.shape == (0, 0, 0)


# Files


@settings(max_examples=40)
@given(drafts=some_drafts(), group=st.integers(1, 8), batch=st.integers(1, 7), cuts=st.lists(st.integers(0, 12)))
def test_round_trip_is_bit_identical(tmp_path_factory, drafts, group, batch, cuts):
    path = tmp_path_factory.mktemp("traces") / "drafts.parquet"
    ends = [0, *sorted(min(cut, len(drafts.request)) for cut in cuts), len(drafts.request)]
    with traces.Writer(path, {"drafter": "bigram", "K": "7"}, row_group_size=group) as writer:
        for start, end in itertools.pairwise(ends):
            writer.write(LabelledDrafts(*(column[start:end] for column in drafts)))
    got, metadata = traces.read_parquet(path)
    assert identical(got, drafts)
    assert metadata == traces.read_metadata(path) == {"drafter": "bigram", "K": "7"}
    batches = list(traces.iter_batches(path, batch))
    assert [len(part.request) for part in batches[:-1]] == [batch] * (len(batches) - 1)
    assert all(0 < len(part.request) <= batch for part in batches)
    assert identical(traces.concatenate([make_drafts(0), *batches]), drafts)
    sizes = [parquet.ParquetFile(path).metadata.row_group(i).num_rows for i in range(-(-len(drafts.request) // group))]
    assert sizes[:-1] == [group] * (len(sizes) - 1)


def test_streaming_reads_one_row_group_at_a_time(tmp_path):
    path = tmp_path / "drafts.parquet"
    with traces.Writer(path, row_group_size=1000) as writer:
        for part in range(50):
            writer.write(make_drafts(1000, seed=part))
    pool = pyarrow.default_memory_pool()
    whole = 50 * 1000 * sum(np.dtype(column.dtype).itemsize for column in SCHEMA.values())
    before, highest, rows = pool.bytes_allocated(), 0, 0
    for batch in traces.iter_batches(path, 100):
        highest, rows = max(highest, pool.bytes_allocated() - before), rows + len(batch.request)
    assert rows == 50_000 and highest < whole / 10


def test_nothing_appears_before_the_end_and_errors_leave_the_old_file(tmp_path):
    path = tmp_path / "drafts.parquet"
    with traces.Writer(path) as writer:
        writer.write(make_drafts(10))
        assert not path.exists()
    before = path.read_bytes()
    with pytest.raises(RuntimeError, match="stop"), traces.Writer(path, row_group_size=5) as writer:
        writer.write(make_drafts(20))
        raise RuntimeError("stop")
    bad = make_drafts(6)._replace(q=np.full(6, 2.0, np.float32))
    message = r"drafts.parquet: column 'q', row 10: expected a number in \[0, 1\], got 2.0"
    with pytest.raises(ValueError, match=message), traces.Writer(path) as writer:
        writer.write(make_drafts(10))
        writer.write(bad)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["drafts.parquet"]
    with pytest.raises(ValueError, match="not open"):
        writer.write(bad)
    with pytest.raises(ValueError, match="opened before"), writer:
        pass
    with pytest.raises(FileNotFoundError):
        traces.write_parquet(tmp_path / "no folder" / "drafts.parquet", make_drafts(1))


def test_the_writer_keeps_no_reference_to_the_arrays(tmp_path):
    drafts, path = make_drafts(5), tmp_path / "drafts.parquet"
    want = make_drafts(5)
    with traces.Writer(path) as writer:
        writer.write(drafts)
        for column in drafts:
            column[:] = 0
    assert identical(traces.read_parquet(path)[0], want)


BAD = [
    ("position", np.int32(-1), "expected a number of at least 0, got -1"),
    ("round", np.int32(-3), "expected a number of at least 0, got -3"),
    ("entropy", np.float32(np.nan), "expected a finite number, got nan"),
    ("margin", np.float32(np.inf), "expected a finite number, got inf"),
    ("q", np.float32(1.5), r"expected a number in \[0, 1\], got 1.5"),
    ("q", np.float32(np.nan), r"expected a number in \[0, 1\], got nan"),
    ("a", np.float32(-0.25), r"expected a number in \[0, 1\], got -0.25"),
    ("alpha", np.float32(np.nan), r"expected a number in \[0, 1\], got nan"),
    ("accepted", True, "expected False where not observed"),
    ("has_target_row", False, None),  # p is a number there
]


@pytest.mark.parametrize(("name", "value", "words"), BAD)
def test_bad_rows_are_named_when_writing_and_when_reading(tmp_path, name, value, words):
    drafts, row = make_drafts(40), 23
    plain = {"observed": False, "accepted": False, "has_target_row": True, "p": 0.5, "a": 0.5, "alpha": 0.5}
    for column, ordinary in plain.items():
        getattr(drafts, column)[row] = ordinary
    traces.validate(drafts)
    getattr(drafts, name)[row] = value
    place, words = (f"column '{name}', row 23", words) if words else ("column 'p', row 23", "expected nothing")
    with pytest.raises(ValueError, match=f"mine.parquet: {place}: {words}"):
        traces.write_parquet(tmp_path / "mine.parquet", drafts)
    foreign(tmp_path / "theirs.parquet", drafts, row_group_size=10)
    for read in (traces.read_parquet, lambda path: list(traces.iter_batches(path, 4))):
        with pytest.raises(ValueError, match=f"theirs.parquet: {place}: {words}"):
            read(tmp_path / "theirs.parquet")


def foreign(path, drafts, change=lambda table: table, keys=None, **options):
    """A file that another tool wrote: no checksums, all columns nullable."""
    table = change(pyarrow.table({name: pyarrow.array(column) for name, column in drafts._asdict().items()}))
    keys = {"specav.format": traces.FORMAT, "specav.version": "1"} if keys is None else keys
    parquet.write_table(table.replace_schema_metadata(keys), path, **options)


def test_files_of_other_tools_with_more_columns_in_another_order(tmp_path):
    drafts, path = make_drafts(40), tmp_path / "theirs.parquet"

    def change(table):
        table = table.append_column("score", pyarrow.array(np.arange(40.0))).append_column("prompt", [["x"] * 40])
        return table.select(table.column_names[::-1])

    foreign(path, drafts, change, row_group_size=15)
    got, metadata = traces.read_parquet(path)
    assert identical(got, drafts) and metadata == {}
    batches = list(traces.iter_batches(path, 16))
    assert [len(batch.request) for batch in batches] == [16, 16, 8] and identical(traces.concatenate(batches), drafts)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.drop_columns(["alpha"]), "column 'alpha': expected one of this name, got the columns request"),
        (lambda t: t.rename_columns(["Q" if n == "q" else n for n in t.column_names]), "column 'q': expected one of"),
        (lambda t: t.append_column("q", t.column("q")), "column 'q': expected one of this name, got several"),
        (lambda t: t.set_column(8, "q", t.column("q").cast("double")), "column 'q': expected float, got double"),
        (lambda t: t.set_column(0, "request", t.column("q")), "column 'request': expected int32, got float"),
        (
            lambda t: t.set_column(2, "position", pyarrow.array([0, 1, None] + [0] * 37, pyarrow.int32())),
            "column 'position', row 2: expected int32, got null",
        ),
        (
            lambda t: t.set_column(13, "observed", pyarrow.array([True] * 39 + [None])),
            "column 'observed', row 39: expected bool, got null",
        ),
    ],
)
def test_columns_that_break_the_schema_are_named(tmp_path, change, words):
    path = tmp_path / "theirs.parquet"
    foreign(path, make_drafts(40), change)
    with pytest.raises(ValueError, match=f"theirs.parquet: {words}"):
        traces.read_parquet(path)


def test_foreign_files_are_refused_by_name(tmp_path):
    path = tmp_path / "some.file"
    contents = {
        "empty": b"",
        "text": b"request,round\n0,0\n",
        "magic only": b"PAR1PAR1",
        "zeros": bytes(1000),
        "numpy": b"\x93NUMPY\x01\x00" + bytes(200),
    }
    for data in contents.values():
        path.write_bytes(data)
        for read in (traces.read_parquet, traces.read_metadata, lambda path: next(traces.iter_batches(path, 3))):
            with pytest.raises(ValueError, match=r"some\.file"):
                read(path)
    for keys in (
        {},
        {"specav.format": "another"},
        {"specav.format": traces.FORMAT},
        {"specav.format": traces.FORMAT, "specav.version": "2"},
        {"specav.format": traces.FORMAT, "specav.version": "1", "specav.metadata": "[1]"},
        {"specav.format": traces.FORMAT, "specav.version": "1", "specav.checksums": "{}"},
        {
            "specav.format": traces.FORMAT,
            "specav.version": "1",
            "specav.checksums": '{"metadata": 1, "row_groups": []}',
        },
    ):
        foreign(path, make_drafts(4), keys=keys)
        with pytest.raises(ValueError, match=r"some\.file"):
            traces.read_parquet(path)
    with pytest.raises(FileNotFoundError):
        traces.read_parquet(tmp_path / "missing.parquet")
    with pytest.raises(ValueError, match="batch_size: expected"):
        traces.iter_batches(path, 0)


def damaged(path, data, drafts, metadata):
    """Reads a damaged file: True if refused by name; fails unless it is that or the very same content."""
    path.write_bytes(data)
    try:
        found = traces.read_parquet(path)
    except ValueError as error:
        assert str(path) in str(error)
        return True
    assert identical(found[0], drafts) and found[1] == metadata
    return False


def test_truncated_files_are_refused_at_every_length(tmp_path):
    drafts, metadata = make_drafts(30), {"drafter": "bigram"}
    path = tmp_path / "drafts.parquet"
    traces.write_parquet(path, drafts, metadata)
    data = path.read_bytes()
    for length in {*range(0, len(data), 13), *range(len(data) - 60, len(data))}:
        assert damaged(path, data[:length], drafts, metadata), length
    for cut in range(4, len(data) - 50, 97):  # a hole rather than a missing end
        assert damaged(path, data[:cut] + data[cut + 40 :], drafts, metadata), cut


@pytest.mark.parametrize("checksummed", [True, False])
def test_flipped_bytes_are_refused_or_harmless(tmp_path, checksummed):
    drafts, metadata = make_drafts(30), {"drafter": "bigram"} if checksummed else {}
    path = tmp_path / "drafts.parquet"
    if checksummed:
        traces.write_parquet(path, drafts, metadata)
    else:
        foreign(path, drafts, write_page_checksum=True)
    data = path.read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for place in range(0, len(data), 7):
        flipped = bytearray(data)
        flipped[place] ^= 1 << int(rng.integers(8))
        if checksummed:
            refused += damaged(path, bytes(flipped), drafts, metadata)
        else:  # without checksums damage may go unseen, but never ends in anything but a ValueError
            path.write_bytes(bytes(flipped))
            try:
                traces.read_parquet(path)
            except ValueError:
                refused += 1
    assert refused > len(data) / 7 / 4


def test_checksums_find_values_that_the_pages_do_not_protect(tmp_path):
    """A file written again with one value changed, its pages sound and its old checksums kept."""
    drafts, path = make_drafts(30), tmp_path / "drafts.parquet"
    with traces.Writer(path, {"seed": "1"}, row_group_size=10) as writer:
        writer.write(drafts)
    keys = parquet.ParquetFile(path).metadata.metadata
    other = make_drafts(30)
    other.q[15] = 0.125
    foreign(path, other, keys=keys, row_group_size=10)
    with pytest.raises(ValueError, match="damaged, the checksum of rows from 10 on does not fit"):
        traces.read_parquet(path)
    stream = traces.iter_batches(path, 10)
    assert identical(next(stream), LabelledDrafts(*(column[:10] for column in drafts)))
    with pytest.raises(ValueError, match="rows from 10 on"):
        next(stream)
    foreign(path, drafts, keys={**keys, b"specav.metadata": json.dumps({"seed": "2"}).encode()}, row_group_size=10)
    with pytest.raises(ValueError, match="checksums do not fit"):
        traces.read_parquet(path)


def test_wrong_types_in_memory_are_named(tmp_path, own_checks):
    drafts, path = make_drafts(4), tmp_path / "drafts.parquet"
    with pytest.raises(TypeError, match="column 'q': expected float32, got float64"):
        traces.write_parquet(path, drafts._replace(q=drafts.q.astype(np.float64)))
    with pytest.raises(ValueError, match=r"column 'a': expected shape \[N\] as request \[4\], got \[3\]"):
        traces.write_parquet(path, drafts._replace(a=drafts.a[:3]))
    with pytest.raises(TypeError, match="metadata: expected strings"):
        traces.write_parquet(path, drafts, {"K": 7})
    with pytest.raises(ValueError, match="row_group_size"):
        traces.Writer(path, row_group_size=0)
    assert not path.exists()


def test_missing_pyarrow_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for call in (
        lambda: traces.write_parquet(tmp_path / "drafts.parquet", make_drafts(1)),
        lambda: traces.read_parquet(tmp_path / "drafts.parquet"),
        lambda: next(traces.iter_batches(tmp_path / "drafts.parquet", 1)),
    ):
        with pytest.raises(ImportError, match=r"specav\[traces\]"):
            call()
    assert len(traces.from_logits(TOKENS, LOGITS, LOGITS).request) == 6  # needs no pyarrow


def test_schema_and_columns_agree():
    assert tuple(SCHEMA) == LabelledDrafts._fields
    assert {name for name, column in SCHEMA.items() if column.nullable} == set(KNOWN)
    assert all(column.doc for column in SCHEMA.values())
