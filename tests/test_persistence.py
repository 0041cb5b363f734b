"""State files: round trips to the bit, and refusals that name the file and the fault."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specav import persistence
from specav.estimators import online_logistic, vllm_online
from specav.labels import Labels
from specav.persistence import load_state, read_metadata, save_state


def learned_state(estimator, positions):
    rng = np.random.default_rng(0)
    state = estimator.init()
    shape = (8, positions) if len(estimator.features) == 1 else (8, positions, len(estimator.features))
    features = jnp.asarray(rng.normal(size=shape), jnp.float32)
    accepted = jnp.asarray(rng.random((8, positions)) < 0.7)
    probs = estimator.predict(state, features)
    return estimator.step(state, features, probs, Labels(accepted, jnp.ones_like(accepted)))[0]


def same_bits(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("make", [vllm_online, lambda k: online_logistic(k, ("logit_q_max", "entropy"))])
def test_estimators_go_on_from_a_file_as_if_nothing_had_happened(tmp_path, make):
    estimator = make(3)
    state = learned_state(estimator, 3)
    save_state(tmp_path / "state", state, metadata={"features": list(estimator.features)})
    same_bits(load_state(tmp_path / "state", estimator.init()), state)
    same_bits(load_state(tmp_path / "state", jax.eval_shape(estimator.init)), state)
    assert read_metadata(tmp_path / "state") == {"features": list(estimator.features)}
    assert os.listdir(tmp_path) == ["state"]


@given(st.data())
def test_round_trip_of_every_dtype_and_shape(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("states") / "state"
    dtypes = [jnp.float32, jnp.bfloat16, jnp.float16, jnp.int32, jnp.uint8, jnp.bool_]
    shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
    state = {}
    for i in range(data.draw(st.integers(0, 4))):
        dtype, shape = np.dtype(data.draw(st.sampled_from(dtypes))), data.draw(shapes)
        size = int(np.prod(shape)) * dtype.itemsize
        raw = data.draw(st.binary(min_size=size, max_size=size))  # any bits: NaN payloads, infinities, -0.0
        if dtype.kind == "b":
            raw = bytes(byte & 1 for byte in raw)
        state[f"leaf{i}"] = jnp.asarray(np.frombuffer(raw, dtype).reshape(shape))
    state["nested"] = (None, [jnp.zeros(())])
    save_state(path, state)
    same_bits(load_state(path, state), state)


def test_numpy_float64_and_plain_numbers_keep_their_type(tmp_path):
    state = {"wide": np.array([1.0, np.pi]), "number": 3.5}
    save_state(tmp_path / "state", state)
    back = load_state(tmp_path / "state", state)
    assert back["wide"].dtype == np.float64
    np.testing.assert_array_equal(back["wide"], state["wide"])
    assert float(back["number"]) == 3.5


@pytest.fixture
def example(tmp_path):
    """A path, its bytes, and the state in it."""
    state = learned_state(vllm_online(2), 2)
    save_state(tmp_path / "example.state", state, kind="estimator", metadata={"note": "x"})
    return tmp_path / "example.state", (tmp_path / "example.state").read_bytes(), state


def test_every_flipped_byte_is_noticed(example):
    path, data, state = example
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1 << (position % 8)
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"example\.state: (not a|expected format|damaged)"):
            load_state(path, state)


def test_every_truncation_and_every_addition_is_noticed(example):
    path, data, state = example
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(ValueError, match=r"example\.state: (not a specav|truncated|damaged)"):
            load_state(path, state)
    path.write_bytes(data + b"\0")
    with pytest.raises(ValueError, match="damaged"):
        load_state(path, state)


def test_foreign_files_other_versions_and_other_kinds_are_refused(example, tmp_path):
    path, data, state = example
    np.savez(tmp_path / "foreign.npz", state.slopes)
    with pytest.raises(ValueError, match=r"foreign\.npz: not a specav state file"):
        load_state(tmp_path / "foreign.npz", state)
    with pytest.raises(ValueError, match="expected a file of kind 'policy', got 'estimator'"):
        load_state(path, state, kind="policy")
    same_bits(load_state(path, state, kind="estimator"), state)
    path.write_bytes(data[:8] + (2).to_bytes(4, "little") + data[12:])
    with pytest.raises(ValueError, match="expected format version 1, got 2"):
        load_state(path, state)


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[1]",
        b'{"kind": "x", "metadata": {}}',
        b'{"kind": "x", "metadata": {}, "leaves": [{"path": "a", "dtype": "object", "shape": [1]}]}',
        b'{"kind": "x", "metadata": {}, "leaves": [{"path": "a", "dtype": "float32", "shape": [2]}]}',
        b'{"kind": "x", "metadata": {}, "leaves": [{"path": "a", "dtype": "float32", "shape": [-1, -1]}]}',
        b'{"kind": "x", "metadata": {}, "leaves": [{"path": 0, "dtype": "float32", "shape": [1]}]}',
        b'{"kind": "x", "metadata": {}, "leaves": 4}',
    ],
)
def test_malformed_headers_with_a_right_checksum_are_refused(tmp_path, header):
    body = header + b"\0\0\0\0"
    prefix = persistence._PREFIX.pack(persistence.MAGIC, persistence.FORMAT_VERSION, len(header))
    (tmp_path / "crafted").write_bytes(prefix + persistence._checksum(prefix, body) + body)
    with pytest.raises(ValueError, match="crafted: malformed header"):
        load_state(tmp_path / "crafted", {"a": np.float32(0)})


def test_states_of_another_shape_dtype_or_structure_are_refused_by_leaf(example):
    path, _, state = example
    with pytest.raises(ValueError, match=r"expected state\.intercepts to be float32 \[5\], got float32 \[2\]"):
        load_state(path, vllm_online(5).init())
    with pytest.raises(ValueError, match=r"expected state\.slopes to be int32 \[1\], got float32 \[1\]"):
        load_state(path, state._replace(slopes=jnp.zeros(1, jnp.int32)))
    with pytest.raises(ValueError, match=r"expected a leaf state\.remembered, the file has none"):
        load_state(path, online_logistic(2).init())
    with pytest.raises(ValueError, match=r"holds a leaf state\.gap, which the given state has not"):
        load_state(path, state._replace(gap=None))


def test_what_cannot_be_stored_is_refused_and_leaves_the_old_file(example):
    path, data, _ = example
    for bad, word in [({"k": jax.random.key(0)}, "key<"), ({"k": "text"}, "str"), ({"k": np.array([None])}, "object")]:
        with pytest.raises(TypeError, match=r"state\['k'\]: expected .*" + word):
            save_state(path, bad)
    with pytest.raises(TypeError):
        save_state(path, {}, metadata={"x": object()})
    assert path.read_bytes() == data
    assert os.listdir(path.parent) == ["example.state"]
