"""Static dependence analysis: sound against perturbation of inputs, exact where it says so, and open about the rest."""

import functools
import time

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from specav import policies
from specav.costs import cost_table
from specav.features import FEATURES, DraftFeatures
from specav.lossless.jaxpr_dependence import SLOT_INPUTS, dependence, example_inputs, input_dependence
from specav.policies import from_function

B, K = 2, 3
SPECIAL = np.asarray([-2, -1, 0, 0.5, 1, 2, 40, np.inf, -np.inf, np.nan], np.float32)


def measured(function, shape, dtype=np.float32, num_bases=24):
    """bool [*out, *in]: which input elements were seen to change which output elements, over many values."""
    rng = np.random.default_rng(0)
    size = int(np.prod(shape))
    values = SPECIAL if dtype == np.float32 else np.asarray([-3, -1, 0, 1, 2, 7], dtype)
    bases = rng.choice(values, (num_bases, size))
    bases[: num_bases // 2] = rng.integers(-3, 4, (num_bases // 2, size))
    changed = np.broadcast_to(bases[:, None, None], (num_bases, size, len(values), size)).copy()
    for element in range(size):
        changed[:, element, :, element] = values
    # One input after the other: XLA's vectorised maximum on CPUs drops some NaN, which ones depends on the batch.
    run = jax.jit(lambda xs: jax.lax.map(lambda x: function(x.reshape(shape)), xs))
    before = np.asarray(run(jnp.asarray(bases)))
    after = np.asarray(run(jnp.asarray(changed.reshape(-1, size)))).reshape(
        num_bases, size, len(values), *before.shape[1:]
    )
    same = after == before[:, None, None]
    if before.dtype.kind == "f":
        same |= np.isnan(after) & np.isnan(before[:, None, None])
    moved = (~same).any(axis=(0, 2))
    return np.moveaxis(moved, 0, -1).reshape(*before.shape[1:], *shape)


MASK = np.asarray([[True, False, True], [False, True, True]])
TRIANGLE = np.tril(np.ones((3, 3), np.float32))
row = lambda x: jnp.arange(x.shape[1])[None, :]  # noqa: E731

EXACT = {
    "elementwise": lambda x: jnp.exp(x) + x * 2.0 - 1.0,
    "comparison": lambda x: (x > 0) | (x < -1),
    "constant mask": lambda x: jnp.where(MASK, x, 0.0),
    "constant mask of a sum": lambda x: jnp.where(MASK, x, 0.0).sum(axis=0),
    "and with a constant": lambda x: (x > 0) & MASK,
    "or with a constant": lambda x: (x > 0) | MASK,
    "whole zeros": lambda x: (x > 0).astype(jnp.int32) * MASK.astype(np.int32),
    "minimum with the least": lambda x: jnp.minimum((x > 0).astype(jnp.int32), MASK.astype(np.int32)),
    "slice and concatenate": lambda x: jnp.concatenate([x[:, 1:], x[:1, :1].repeat(2, axis=0)], axis=1),
    "roll": lambda x: jnp.roll(x, 1, axis=1) > 0,
    "pad": lambda x: jnp.pad(x, ((1, 0), (0, 2)))[:, 1:],
    "negative pad": lambda x: jax.lax.pad(x, 0.0, ((0, 0, 0), (-1, 1, 1))),
    "flip, transpose, reshape": lambda x: jnp.flip(x, axis=1).T.reshape(6)[1:5],
    "tile": lambda x: jnp.tile(x, (2, 1)),
    "stack": lambda x: jnp.stack([x[:, 0], x[:, 2]], axis=1),
    "cumulative sum": lambda x: jnp.cumsum(x, axis=1),
    "reverse cumulative maximum": lambda x: jax.lax.cummax(x, axis=0, reverse=True),
    "cumulative product": lambda x: jnp.cumprod(x, axis=1),
    "reductions": lambda x: jnp.max(x, axis=0) + jnp.min(x, axis=0),
    "all": lambda x: jnp.all(x > 0, axis=1),
    "argmax": lambda x: jnp.argmax(x, axis=1),
    "matrix product": lambda x: x @ TRIANGLE,
    "batched product": lambda x: jnp.einsum("bi,bi->b", x, x),
    "known gather": lambda x: x[jnp.asarray([1, 0, 1]), jnp.asarray([2, 2, 0])],
    "out of range": lambda x: jnp.take_along_axis(x, jnp.asarray([[0, 7], [1, 2]]), axis=1, mode="fill"),
    "clipped": lambda x: jnp.take_along_axis(x, jnp.asarray([[0, 7], [1, 2]]), axis=1, mode="clip"),
    "known scatter": lambda x: x.at[:, 1].set(5.0),
    "known scatter of values": lambda x: jnp.zeros((2, 3)).at[0, jnp.asarray([2, 0])].set(x[1, :2]),
    "scatter and add": lambda x: x.at[0, 1].add(x[1, 1]),
    "known dynamic slice": lambda x: jax.lax.dynamic_slice(x, (jnp.int32(0), jnp.int32(9)), (2, 2)),
    "known update": lambda x: jax.lax.dynamic_update_slice(x, x[:1, :1], (jnp.int32(1), jnp.int32(1))),
    "jit inside": lambda x: jax.jit(lambda y: y[:, ::2] + 1.0)(x),
    "custom derivative": lambda x: jax.nn.relu(x)[:, :2],
    "checkpoint": lambda x: jax.checkpoint(lambda y: y[:, 1:] * 2.0)(x),
    "known branch": lambda x: jax.lax.cond(True, lambda y: y[:, 0], lambda y: y[:, 1], x),
    "clip": lambda x: jnp.clip(x[:, :2], 0.0, 1.0),
    "bits": lambda x: jax.lax.bitcast_convert_type(x, jnp.int32)[:, 1:] >> 24,
    "short scan": lambda x: jax.lax.scan(lambda c, y: (c + y, c * 2.0), jnp.zeros(2), x.T)[1],
    "reverse scan": lambda x: jax.lax.scan(lambda c, y: (c + y, c), jnp.zeros(2), x.T, reverse=True)[1],
    "short loop": lambda x: jax.lax.fori_loop(0, 2, lambda i, y: jnp.roll(y, 1, axis=1), x) > 0,
    "counted while": lambda x: jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1][::-1]), (0, x))[1],
}


@pytest.mark.parametrize("name", EXACT)
def test_exact_primitives(name):
    """Every listed element does matter for some values, and no other element ever does."""
    found = input_dependence(EXACT[name], jnp.zeros((2, 3)))
    assert found.conservative == ()
    np.testing.assert_array_equal(found.inputs[0], measured(EXACT[name], (2, 3)))


def long_scan(x):
    return jax.lax.scan(lambda c, _: (c + 1.0, None), x[:, 0], None, length=65)[0]


CONSERVATIVE = {
    "sort": lambda x: jnp.sort(x, axis=1),
    "top_k": lambda x: jax.lax.top_k(x, 2)[0],
    "while": lambda x: jax.lax.while_loop(
        lambda c: (c[0] < 2) & (c[1][0, 0] < 1.0), lambda c: (c[0] + 1, c[1] + 1.0), (0, x)
    )[1],
    "scan": long_scan,
    "cond": lambda x: jax.lax.cond(x[0, 0] > 0, lambda y: y[:, 0], lambda y: y[:, 1], x),
    "gather": lambda x: jnp.take_along_axis(x, (x[:, :1] > 0).astype(jnp.int32), axis=1),
    "dynamic_slice": lambda x: jax.lax.dynamic_slice(x, (0, (x[0, 0] > 0).astype(jnp.int32)), (2, 2)),
    "dynamic_update_slice": lambda x: jax.lax.dynamic_update_slice(
        x, x[:1, :1], (jnp.int32(0), (x[0, 0] > 0).astype(jnp.int32))
    ),
    "scatter": lambda x: x.at[0, (x[0, 0] > 0).astype(jnp.int32)].set(0.0),
    "reduce_window_max": lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2), (1, 1), "VALID"),
    "cholesky": lambda x: jnp.linalg.cholesky(x[:, :2]),
}


@pytest.mark.parametrize("name", CONSERVATIVE)
def test_conservative_primitives_are_named_and_sound(name):
    found = input_dependence(CONSERVATIVE[name], jnp.zeros((2, 3)))
    assert name in found.conservative
    assert not np.any(measured(CONSERVATIVE[name], (2, 3)) & ~found.inputs[0])


def test_rows_stay_apart_where_indices_are_unknown():
    own = np.eye(2, dtype=bool)[:, None, :, None]
    for name in ("sort", "top_k", "gather"):
        found = input_dependence(CONSERVATIVE[name], jnp.zeros((2, 3))).inputs[0]
        np.testing.assert_array_equal(found, np.broadcast_to(own, found.shape))


def test_floats_times_zero_read_their_operand():
    reads = lambda f: input_dependence(f, jnp.zeros(2)).inputs[0]  # noqa: E731
    assert reads(lambda x: x * 0.0)[0, 0] and reads(lambda x: x - x)[0, 0] and reads(lambda x: x != x)[0, 0]
    assert measured(lambda x: jnp.isnan(x * 0.0), (2,))[0, 0]
    assert not reads(lambda x: (x > 0).astype(jnp.int32) * 0).any()


def test_what_a_trace_cannot_show_reads_everything():
    def callback(x):
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        return x[0], jax.pure_callback(lambda: np.float32(0), shape)

    first, second = input_dependence(callback, jnp.zeros(3))
    assert first.inputs[0].tolist() == [True, False, False] and not first.conservative
    assert second.inputs[0].all() and second.conservative == ("pure_callback",)

    def reference(x):
        box = jax.new_ref(jnp.zeros(()))
        box[...] = x[2]
        return box[...]

    assert input_dependence(reference, jnp.zeros(3)).inputs[0].all()


def test_results_have_the_structure_of_the_function():
    found = input_dependence(lambda a, b: {"s": a["x"] + b[0], "n": jnp.int32(3)}, {"x": jnp.zeros(2)}, (jnp.ones(2),))
    assert found["s"].inputs[0]["x"].tolist() == found["s"].inputs[1][0].tolist() == np.eye(2, dtype=bool).tolist()
    assert found["n"].inputs[0]["x"].shape == (2,) and not found["n"].inputs[0]["x"].any()
    # Arguments that hold no element, and sets that fill whole words.
    empty = input_dependence(lambda a, b: b + a.sum(), jnp.zeros((0,)), jnp.zeros(128))
    assert empty.inputs[0].shape == (128, 0) and (empty.inputs[1] == np.eye(128, dtype=bool)).all()


# Counts: what {count >= i} reads.


def user(count):
    return from_function(lambda state, inputs: (count(inputs), state))


def passed(inputs):
    return inputs.features.margin > 1.0


def sentinel(inputs):
    stop = jnp.ones((inputs.num_drafts.shape[0], 1), jnp.bool_)
    return jnp.argmax(jnp.concatenate([~passed(inputs), stop], axis=1), axis=1)


def by_steps(inputs):
    def step(carry, column):
        alive, count = carry
        alive = alive & column
        return (alive, count + alive.astype(jnp.int32)), None

    rows = inputs.num_drafts.shape[0]
    return jax.lax.scan(step, (jnp.ones(rows, bool), jnp.zeros(rows, jnp.int32)), passed(inputs).T)[0][1]


prefix = lambda inputs: jnp.cumprod(passed(inputs), axis=1).sum(axis=1)  # noqa: E731
width = lambda inputs: inputs.draft_tokens.shape[1]  # noqa: E731

# The last margin (1..K) that decides whether draft i = 1..4 is verified, and whether all before it do too.
COUNTS = {
    "cumulative product": (prefix, [1, 2, 3, 4]),
    "cumulative minimum": (lambda i: jax.lax.cummin(passed(i).astype(jnp.int8), axis=1).sum(axis=1), [1, 2, 3, 4]),
    "of floats": (lambda i: jnp.cumprod(jnp.where(passed(i), 1.0, 0.0), axis=1).sum(1).astype(int), [1, 2, 3, 4]),
    "no failure so far": (lambda i: (jnp.cumsum(~passed(i), axis=1) == 0).sum(axis=1), [1, 2, 3, 4]),
    "fewer than one failure": (lambda i: (jnp.cumsum(~passed(i), axis=1) < 1).sum(axis=1), [1, 2, 3, 4]),
    "one failure allowed": (lambda i: (jnp.cumsum(~passed(i), axis=1) <= 1).sum(axis=1), [1, 2, 3, 4]),
    "running minimum of floats": (lambda i: (jax.lax.cummin(i.features.margin, axis=1) > 1).sum(1), [1, 2, 3, 4]),
    "sentinel": (sentinel, [1, 2, 3, 4]),
    "complement": (lambda i: width(i) - (jnp.cumsum(~passed(i), axis=1) > 0).sum(axis=1), [1, 2, 3, 4]),
    "one more": (lambda i: jnp.minimum(prefix(i) + 1, i.num_drafts), [0, 1, 2, 3]),
    "one less": (lambda i: jnp.maximum(prefix(i) - 1, 0), [2, 3, 4, 0]),
    "active only": (lambda i: jnp.where(i.active, jnp.clip(prefix(i), 0, i.num_drafts), 0), [1, 2, 3, 4]),
    "times active": (lambda i: prefix(i) * i.active.astype(jnp.int32), [1, 2, 3, 4]),
    "at most two": (lambda i: jnp.minimum(prefix(i), 2), [1, 2, 0, 0]),
    "at least two": (lambda i: jnp.maximum(prefix(i), 2), [0, 0, 3, 4]),
    "there and back": (lambda i: (jnp.arange(width(i)) < prefix(i)[:, None]).sum(axis=1), [1, 2, 3, 4]),
    "branches on the past": (
        lambda i: jax.lax.cond(i.num_sampling > 1, prefix, lambda i: prefix(i) + 1, i), [1, 2, 3, 4]
    ),
    "state machine": (lambda i: jnp.where(passed(i)[:, 0], prefix(i), 0), [1, 2, 3, 4]),
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTS)
def test_counts_read_prefixes(name):
    count, last = COUNTS[name]
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        found = dependence(user(count), num_requests=2, num_draft_tokens=4)
    assert found.conservative == () and set(found.reads) <= {"margin"}
    reads = found.reads["margin"]
    for request in range(2):
        assert not reads[request, :, 1 - request].any()
        for i, end in enumerate(last):
            assert reads[request, i, request].tolist() == [position < end for position in range(4)], i


UNORDERED = {
    "a mask that may rise again": lambda i: passed(i).sum(axis=1),
    "an argmin without a failure": lambda i: jnp.argmin(passed(i), axis=1),
    "a wrapping sum": lambda i: (jnp.cumsum((~passed(i)).astype(jnp.int8) * jnp.int8(100), axis=1) <= 0).sum(axis=1),
    "a minimum from below": lambda i: (jax.lax.cummin(i.features.margin, axis=1) <= 1).sum(axis=1),
    "a product of floats": lambda i: (jnp.cumprod(i.features.margin, axis=1) > 0.5).sum(axis=1),
    "a swing back": lambda i: jnp.where(prefix(i) > 2, 0, prefix(i)),
    "steps": by_steps,
}


@pytest.mark.parametrize("name", UNORDERED)
def test_counts_without_order_read_everything(name):
    """A proof is not at hand for these: each event may read all that the count reads (and for most it does)."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        found = dependence(user(UNORDERED[name]), num_requests=2, num_draft_tokens=4)
    own = found.reads["margin"][0, :, 0]
    assert own[:3, :3].all() and (own[:3].all() or name == "a swing back"), own


def test_a_suffix_is_counted_from_its_end():
    """What passes at the end of the block: {count >= i} reads the last i positions."""
    count = lambda i: jnp.cumprod(passed(i)[:, ::-1], axis=1)[:, ::-1].sum(axis=1)  # noqa: E731
    own = dependence(user(count), num_requests=1, num_draft_tokens=4).reads["margin"][0, :, 0]
    assert own.tolist() == [[position >= 4 - i for position in range(4)] for i in range(1, 5)]


def test_survival_is_taken_to_fall():
    found = dependence(user(lambda i: jnp.sum(i.survival >= 0.3, axis=1)), num_requests=2, num_draft_tokens=3)
    np.testing.assert_array_equal(found.reads["survival"], np.eye(6, dtype=bool).reshape(2, 3, 2, 3))
    found = dependence(user(lambda i: jnp.sum(i.acceptance >= 0.3, axis=1)), num_requests=2, num_draft_tokens=3)
    assert found.reads["acceptance"][0, 0, 0].all()


# Soundness at large: random policies against perturbed inputs.

READ = ("margin", "acceptance", "draft_tokens")


def random_policy(seed, length):
    """A composition of random operations on float, whole, and bool [B, K] arrays and counts [B], ending in a count."""

    def count(inputs):
        rng = np.random.default_rng(seed)
        floats = [inputs.features.margin, inputs.acceptance]
        wholes = [inputs.draft_tokens, jnp.broadcast_to(jnp.arange(K), (B, K)).astype(jnp.int32)]
        masks = [inputs.features.margin > 0.5, inputs.acceptance > 0.5]
        counts = [inputs.num_drafts, jnp.sum(jnp.cumprod(masks[0], axis=1), axis=1, dtype=jnp.int32)]

        def pick(pool):  # recent results more often, so that operations chain
            return pool[max(len(pool) - 1 - int(rng.geometric(0.5) - 1), 0)]

        cumulative = (jnp.cumsum, jnp.cumprod, jax.lax.cummin, jax.lax.cummax)
        shift = int(rng.integers(-1, 3))
        makers = {
            "float": [
                lambda: pick(floats) + pick(floats),
                lambda: pick(floats) * jnp.asarray(rng.integers(0, 2, (B, K)), jnp.float32),
                lambda: jnp.where(pick(masks), pick(floats), pick(floats)),
                lambda: cumulative[rng.integers(4)](pick(floats), axis=int(rng.integers(2))),
                lambda: jax.lax.cummin(pick(floats), axis=1, reverse=bool(rng.integers(2))),
                lambda: pick(floats)[:, ::-1],
                lambda: jnp.roll(pick(floats), 1, axis=int(rng.integers(2))),
                lambda: jnp.sort(pick(floats), axis=1),
                lambda: pick(floats) @ jnp.asarray(rng.integers(0, 2, (K, K)), jnp.float32),
                lambda: jnp.take_along_axis(pick(floats), jnp.clip(pick(wholes), 0, K - 1), axis=1),
                lambda: pick(floats).at[int(rng.integers(B)), int(rng.integers(K))].set(pick(floats)[0, 0]),
                lambda: pick(wholes).astype(jnp.float32),
                lambda: -pick(floats),
                lambda: jnp.minimum(pick(floats), pick(floats)),
            ],
            "mask": [
                lambda: pick(floats) > float(rng.choice([0.0, 0.5, 1.0])),
                lambda: pick(floats) <= pick(floats),
                lambda: pick(wholes) == int(rng.integers(0, 2)),
                lambda: pick(wholes) < int(rng.integers(0, 3)),
                lambda: pick(wholes) >= pick(wholes),
                lambda: ~pick(masks),
                lambda: pick(masks) & pick(masks),
                lambda: pick(masks) | jnp.asarray(rng.random((B, K)) < 0.5),
                lambda: jnp.where(pick(masks), pick(masks), pick(masks)),
                lambda: jnp.arange(K)[None, :] < pick(counts)[:, None],
                lambda: jax.lax.cummin(pick(masks).astype(jnp.int32), axis=1) > 0,
            ],
            "whole": [
                lambda: pick(masks).astype(jnp.int32),
                lambda: cumulative[rng.integers(4)](pick(masks).astype(jnp.int32), axis=int(rng.integers(2))),
                lambda: jax.lax.cumsum(pick(wholes), axis=1, reverse=bool(rng.integers(2))),
                lambda: pick(wholes) * pick(wholes),
                lambda: jnp.minimum(pick(wholes), pick(wholes)),
                lambda: jnp.clip(pick(wholes), 0, 1),
                lambda: 1 - pick(wholes),
                lambda: jnp.where(pick(masks), pick(wholes), shift),
                lambda: jnp.concatenate([pick(wholes)[:, :1] * 0, pick(wholes)[:, 1:]], axis=1),
            ],
            "count": [
                lambda: jnp.sum(pick(wholes), axis=1),
                lambda: jnp.sum(pick(masks), axis=1),
                lambda: jnp.sum(jnp.cumprod(pick(masks), axis=1), axis=1),
                lambda: jnp.argmax(jnp.concatenate([pick(masks), jnp.ones((B, 1), bool)], axis=1), axis=1),
                lambda: jnp.argmin(pick(masks).astype(jnp.int32), axis=1).astype(jnp.int32),
                lambda: pick(counts) + shift,
                lambda: shift - pick(counts),
                lambda: jnp.minimum(pick(counts), pick(counts)),
                lambda: jnp.maximum(pick(counts), shift),
                lambda: jnp.clip(pick(counts), 0, pick(counts)),
                lambda: jnp.where(pick(masks)[:, 0], pick(counts), pick(counts)),
                lambda: pick(counts) * pick(masks)[:, int(rng.integers(K))].astype(jnp.int32),
                lambda: jax.lax.cond(pick(masks)[0, 0], lambda c: c + 1, lambda c: jnp.minimum(c, 1), pick(counts)),
                lambda: jnp.take_along_axis(pick(wholes), jnp.clip(pick(counts), 0, 2)[:, None], axis=1)[:, 0],
            ],
        }  # fmt: skip
        pools = {"float": floats, "mask": masks, "whole": wholes, "count": counts}
        for kind in [*rng.choice(list(makers), length, p=[0.25, 0.3, 0.2, 0.25]), "count"]:
            made = makers[kind][rng.integers(len(makers[kind]))]()
            pools[kind].append(made.astype(jnp.int32) if kind in ("whole", "count") else made)
        return counts[-1]

    return count


@functools.cache
def perturbed_inputs():
    """Bases [N, ...], and for every read element the bases with that element changed."""
    rng = np.random.default_rng(1)
    number = 48

    def base(name, dtype, shape):
        if name in ("draft_tokens", "num_drafts"):
            return rng.integers(-1, 4, (number, *shape)).astype(dtype)
        return rng.choice(SPECIAL, (number, *shape), p=[0.05, 0.1, 0.15, 0.2, 0.15, 0.15, 0.05, 0.05, 0.05, 0.05])

    spec = example_inputs(B, K)
    bases = {name: base(name, getattr(spec, name).dtype, getattr(spec, name).shape) for name in READ[1:]}
    bases["margin"] = base("margin", np.float32, (B, K))
    bases["num_drafts"] = base("num_drafts", np.int32, (B,))
    everything, labels = {name: [value] for name, value in bases.items()}, []
    for name in READ:
        for s in range(B):
            for j in range(K):
                values = [-1, 0, 1, 2, 3] if name == "draft_tokens" else [-1, 0, 0.5, 1, 2, np.inf, np.nan]
                for value in values:
                    for other, array in bases.items():
                        array = array.copy()
                        if other == name:
                            array[:, s, j] = value
                        everything[other].append(array)
                    labels.append((name, s, j))
    return {name: jnp.asarray(np.concatenate(arrays)) for name, arrays in everything.items()}, labels, number


def violations(seed, length):
    return unlisted(random_policy(seed, length))


def unlisted(count):
    """Decisions that were seen to move with an element that the analysis does not list; numbers seen and listed."""
    found = dependence(user(count), num_requests=B, num_draft_tokens=K)
    values, labels, number = perturbed_inputs()

    def decide(values):
        inputs = policies.PolicyInputs(
            DraftFeatures(margin=values["margin"]), values["draft_tokens"], values["num_drafts"], values["acceptance"]
        )
        return count(inputs)

    counts = np.asarray(jax.jit(lambda v: jax.lax.map(decide, v))(values)).reshape(len(labels) + 1, number, B)
    verified = counts[..., None] >= np.arange(1, K + 1)
    moved = (verified[1:] != verified[0]).any(axis=1)
    wrong, seen, listed = [], 0, sum(reads.sum() for reads in found.reads.values())
    for (name, s, j), where in zip(labels, moved):
        reads = found.reads.get(name, np.zeros((B, K, B, K), bool))[:, :, s, j]
        wrong += [(name, s, j, *place) for place in np.argwhere(where & ~reads)]
        seen += where.sum()
    return wrong, seen, listed


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), length=st.integers(3, 14))
def test_what_moves_a_decision_is_listed(seed, length):
    wrong, _, _ = violations(seed, length)
    assert not wrong, (seed, length, wrong[:5])


def test_random_policies_are_no_idle_check():
    """Most of them read their inputs, and the analysis tells elements that matter from those that do not."""
    results = [violations(seed, 8) for seed in range(12)]
    assert sum(seen > 0 for _, seen, _ in results) >= 6
    assert sum(0 < listed < len(READ) * (B * K) ** 2 for _, _, listed in results) >= 6


def steps_down(inputs):
    return jnp.cumsum(1 - 2 * (inputs.features.margin > 0.5).astype(jnp.int32), axis=1)


high = lambda inputs: jnp.cumprod(inputs.features.margin > 0.5, axis=1) > 0  # noqa: E731
likely = lambda inputs: jnp.cumprod(inputs.acceptance > 0.5, axis=1) > 0  # noqa: E731
even = lambda inputs: jnp.cumprod(inputs.draft_tokens % 2 == 0, axis=1) > 0  # noqa: E731

# Counts of masks that look like prefixes and are not, or the other way round.
TEMPTING = {
    "NaN ends a run of true": lambda i: (jax.lax.cummin(i.features.margin, axis=1) <= 1).sum(axis=1),
    "NaN ends a run of false": lambda i: (jax.lax.cummax(i.features.margin, axis=1) >= 1).sum(axis=1),
    "failures": lambda i: (~high(i)).sum(axis=1),
    "failures, negated": lambda i: (-(high(i).astype(jnp.int32)) + 1).sum(axis=1),
    "one prefix, then another": lambda i: jnp.where(high(i), likely(i), even(i)).sum(axis=1),
    "one suffix, then another": lambda i: jnp.where(~high(i), ~likely(i), ~even(i)).sum(axis=1),
    "a prefix within a prefix": lambda i: jnp.where(high(i), likely(i), False).sum(axis=1),
    "sums that go down and up": lambda i: (steps_down(i) > 0).sum(axis=1),
    "sums that fall": lambda i: (jnp.cumsum(-(i.features.margin > 0.5).astype(jnp.int32), axis=1) < 0).sum(axis=1),
    "sums at an edge": lambda i: (jnp.cumsum((i.features.margin > 0.5).astype(jnp.int32), axis=1) == 3).sum(axis=1),
    "sums inside": lambda i: (jnp.cumsum((i.features.margin > 0.5).astype(jnp.int32), axis=1) == 1).sum(axis=1),
    "a suffix": lambda i: jax.lax.cumprod((i.acceptance > 0.5).astype(jnp.int32), axis=1, reverse=True).sum(axis=1),
    "a suffix by NaN": lambda i: (jax.lax.cummin(i.features.margin, axis=1, reverse=True) < 1).sum(axis=1),
    "a prefix and one more": lambda i: jnp.concatenate([high(i)[:, :2], likely(i)[:, :1]], axis=1).sum(axis=1),
    "a prefix by columns": lambda i: jnp.cumprod(i.acceptance > 0.5, axis=0).sum(axis=1),
    "a prefix turned round": lambda i: high(i)[:, ::-1].sum(axis=1),
    "products of signs": lambda i: (jnp.cumprod(1 - 2 * high(i).astype(jnp.int32), axis=1) > 0).sum(axis=1),
    "no sentinel": lambda i: jnp.argmax(i.acceptance > 0.5, axis=1),
    "a sentinel of the wrong kind": lambda i: jnp.argmin(
        jnp.concatenate([i.acceptance > 0.5, jnp.ones((B, 1), bool)], axis=1), axis=1
    ),
    "the least is below": lambda i: jnp.minimum(high(i).sum(axis=1), -likely(i).sum(axis=1)) + 3,
}


@pytest.mark.parametrize("name", TEMPTING)
def test_tempting_counts(name):
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        wrong, seen, _ = unlisted(TEMPTING[name])
    assert not wrong, wrong[:5]
    assert seen > 0


# The library's policies.


def test_inputs_without_a_part_are_not_listed():
    found = dependence(policies.everything(), num_requests=2, num_draft_tokens=3)
    assert found.reads == {} and found.conservative == ()
    assert set(SLOT_INPUTS) == {*FEATURES, "acceptance", "survival", "draft_tokens"}


def test_explanations():
    found = dependence(policies.threshold("logit_q_sampled", 0.0), num_requests=3, num_draft_tokens=3)
    assert found.explain(1, 2) == (
        "whether draft 2 of request 1 is verified depends on logit_q_sampled of drafts 1-2"
    )  # fmt: skip
    found = dependence(policies.fixed(2), num_requests=3, num_draft_tokens=3)
    assert found.explain(0, 1).endswith("depends on earlier rounds only")
    found = dependence(user(lambda i: jnp.sort(i.acceptance, axis=0).sum(1).astype(int)), num_requests=3,
                       num_draft_tokens=2)  # fmt: skip
    assert found.explain(0, 1).endswith(
        "acceptance of drafts 1-2, acceptance of 4 drafts of 2 other requests (at most: not followed through sort)"
    )
    assert found.conservative == ("sort",) and found.through["sort"].all()
    with pytest.raises(IndexError):
        found.explain(0, 3)


def test_only_the_decision_counts_and_not_the_next_state():
    costs = cost_table([4, 8], [1.0, 1.5])
    found = dependence(policies.trimmer(costs, method="pairwise"), num_requests=3, num_draft_tokens=2)
    assert found.conservative == ()  # choosing the next budget sorts


def test_pairwise_counting_proves_the_trimmer_causal_at_production_shapes():
    """In less than 30 s, and far less: each slot reads its own request up to itself, and all of the others."""
    start = time.monotonic()
    found = dependence(policies.trimmer(cost_table([4, 8], [1.0, 1.5]), method="pairwise"))
    assert time.monotonic() - start < 30
    reads = found.reads["survival"]
    assert reads.shape == (64, 8, 64, 8) and found.conservative == ()
    causal = np.tril(np.ones((8, 8), bool))
    for request in (0, 17, 63):
        np.testing.assert_array_equal(reads[request, :, request], causal)
        assert np.delete(reads[request], request, axis=1).all()


@pytest.mark.usefixtures("own_checks")
def test_errors():
    with pytest.raises(ValueError, match="num_requests: expected an int of at least 1, got 0"):
        dependence(policies.nothing(), num_requests=0)
    with pytest.raises(TypeError, match="num_draft_tokens: expected a Python int"):
        dependence(policies.nothing(), num_draft_tokens=2.0)
    with pytest.raises(TypeError, match=r"expected num_verified int \[2\], got float32 \[2\]"):
        dependence(user(lambda i: i.acceptance[:, 0]), num_requests=2, num_draft_tokens=3)
    with pytest.raises(TypeError, match=r"expected num_verified int \[2\], got int32 \[2, 3\]"):
        dependence(user(lambda i: i.draft_tokens), num_requests=2, num_draft_tokens=3)
