"""The experiments' text, tokenizer, models, checkpoints and training."""

import json
import os
import tempfile
from functools import cache
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import corpus, evaluation, models, train
from experiments.storage import load_tree, save_tree
from experiments.tokenizer import load_tokenizer, train_tokenizer

TINY = models.Config(vocab_size=50, num_layers=2, num_heads=4, num_kv_heads=2, head_size=8, mlp_size=24, window=16)
RECIPE = train.Recipe(TINY, steps=6, batch=3, length=20, peak_rate=3e-3, warmup=2, seed=3)
STREAM = (np.arange(2000) ** 2 % 47).astype(np.uint16)


@cache
def tiny():
    # Larger weights than at initialisation, so that attention matters and a wrong row shows.
    larger = {"embedding": 8.0, "out": 40.0, "down": 20.0}

    def enlarge(path, leaf):
        names = {key.key for key in path}
        return leaf * next((factor for name, factor in larger.items() if name in names), 1.0)

    params = jax.tree_util.tree_map_with_path(enlarge, models.init_params(TINY, 0))
    return models.make_model(TINY, params)


forward = jax.jit(models.forward, static_argnums=0)


@cache
def apply():
    return jax.jit(tiny().apply)


def ints(*values):
    return jnp.asarray(values, jnp.int32)


def text(batch, length, seed=0):
    rows = np.random.default_rng(seed).integers(0, TINY.vocab_size, (batch, length))
    return jnp.asarray(rows, jnp.int32)


def feed(tokens, sizes, length=64, state=None, start=0):
    """Logits [B, sum(sizes), V] of `tokens` fed in blocks of these sizes."""
    batch = tokens.shape[0]
    state = tiny().init_cache(batch, length) if state is None else state
    rows, at = [], start
    for size in sizes:
        block = tokens[:, at - start : at - start + size]
        logits, state = apply()(state, block, jnp.full(batch, at, jnp.int32), jnp.full(batch, size, jnp.int32))
        rows.append(logits)
        at += size
    return jnp.concatenate(rows, axis=1), state


# ---- the KV cache


@pytest.mark.parametrize("sizes", [(40,), (1,) * 40, (7, 1, 20, 12)])
def test_prefill_and_steps_equal_one_forward_pass(sizes):
    tokens = text(3, 40)
    expected = forward(TINY, tiny().params, tokens)
    logits, _ = feed(tokens, sizes)
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    # The window bites, and from the 17th token on: a window of 64 gives other logits there.
    wide = forward(TINY._replace(window=64), tiny().params, tokens)
    assert np.abs(np.asarray(wide - expected)[:, :16]).max() < 1e-5
    assert np.abs(np.asarray(wide - expected)[:, 16]).max() > 1e-3


def test_ragged_prefill_then_steps():
    tokens, lengths = text(3, 30), ints(10, 1, 17)
    state = tiny().init_cache(3, 64)
    first, state = apply()(state, jnp.pad(tokens, ((0, 0), (0, 10))), ints(0, 0, 0), lengths)
    expected = forward(TINY, tiny().params, tokens)
    following = jnp.stack([tokens[b, n : n + 8] for b, n in enumerate([10, 1, 17])])
    second, _ = apply()(state, following, lengths, ints(8, 8, 8))
    for b, n in enumerate([10, 1, 17]):
        np.testing.assert_allclose(first[b, :n], expected[b, :n], atol=1e-4)
        np.testing.assert_allclose(second[b], expected[b, n : n + 8], atol=1e-4)


def test_feeding_again_changes_nothing():
    tokens = text(3, 24)
    _, state = feed(tokens, (16, 8))
    logits, again = apply()(state, tokens[:, 16:24], ints(16, 16, 16), ints(8, 8, 8))
    repeated, same = apply()(again, tokens[:, 16:24], ints(16, 16, 16), ints(8, 8, 8))
    np.testing.assert_array_equal(logits, repeated)
    jax.tree.map(np.testing.assert_array_equal, state, same)


def test_entries_beyond_a_token_are_never_read():
    tokens = text(3, 24)
    _, state = feed(tokens, (12,))
    poisoned = jax.tree.map(lambda leaf: leaf.at[:, :, 12:].set(1e3), state)
    clean, _ = feed(tokens[:, 12:], (4, 4, 4), state=state, start=12)
    stale, _ = feed(tokens[:, 12:], (4, 4, 4), state=poisoned, start=12)
    np.testing.assert_array_equal(clean, stale)
    # ... while an entry before it is.
    earlier = jax.tree.map(lambda leaf: leaf.at[:, :, 11].set(1e3), state)
    changed, _ = feed(tokens[:, 12:], (4,), state=earlier, start=12)
    assert np.abs(np.asarray(changed - clean[:, :4])).max() > 1e-2


def test_padding_is_not_stored_and_a_rejected_tail_is_overwritten():
    tokens = text(3, 24)
    _, state = feed(tokens, (12,))
    _, padded = apply()(state, tokens[:, 12:20], ints(12, 12, 12), ints(3, 0, 8))
    for before, after in zip(jax.tree.leaves(state), jax.tree.leaves(padded), strict=True):
        np.testing.assert_array_equal(before[0, :, 15:], after[0, :, 15:])
        np.testing.assert_array_equal(before[1], after[1])
    other = (tokens + 1) % TINY.vocab_size
    _, rejected = apply()(state, other[:, 12:20], ints(12, 12, 12), ints(8, 8, 8))
    clean, _ = feed(tokens[:, 12:], (2, 4), state=state, start=12)
    after, _ = feed(tokens[:, 12:], (2, 4), state=rejected, start=12)
    np.testing.assert_array_equal(clean, after)


@pytest.mark.parametrize("batch", [3, 33])
@pytest.mark.parametrize("size", [1, 8])
def test_batch_mates_do_not_matter_bitwise(batch, size):
    rng = np.random.default_rng(batch)
    tokens = text(batch, size, seed=batch)
    shapes = tiny().init_cache(batch, 64)
    state = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), shapes)
    positions = jnp.asarray(rng.integers(5, 50, batch), jnp.int32)
    counts = jnp.full(batch, size, jnp.int32)
    logits, after = apply()(state, tokens, positions, counts)
    order = rng.permutation(batch)
    moved_state = jax.tree.map(lambda leaf: leaf[order], state)
    moved, moved_after = apply()(moved_state, tokens[order], positions[order], counts)
    np.testing.assert_array_equal(np.asarray(logits)[order], moved)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a)[order], b), after, moved_after)
    # Other contents in all other rows: row 0 stays.
    mates = jax.tree.map(lambda leaf: leaf.at[1:].multiply(2.0), state)
    other, _ = apply()(mates, tokens.at[1:].set(0), positions.at[1:].set(7), counts.at[1:].set(0))
    np.testing.assert_array_equal(logits[0], other[0])


def test_where_a_block_begins_does_not_matter_bitwise():
    """Blocks of one static size, cut at different places: the same logits for the same token."""
    tokens = text(3, 56)

    def decode(first):
        _, state = feed(tokens[:, :16], (16,))
        rows, at, real = [], 16, first
        while at < 48:
            start, count = jnp.full(3, at, jnp.int32), jnp.full(3, real, jnp.int32)
            logits, state = apply()(state, tokens[:, at : at + 8], start, count)
            rows.append(logits[:, :real])
            at, real = at + real, 8
        return np.concatenate(rows, axis=1)[:, :32]

    for first in (1, 3, 6):
        np.testing.assert_array_equal(decode(8), decode(first))


def test_writes_outside_the_cache_are_dropped():
    tokens = text(3, 24)
    _, state = feed(tokens, (12,), length=16)
    logits, after = apply()(state, tokens[:, 12:20], ints(12, 12, 12), ints(8, 8, 8))
    assert np.isfinite(np.asarray(logits)).all()
    expected, _ = feed(tokens[:, :16], (12, 4), length=64)
    np.testing.assert_allclose(logits[:, :4], expected[:, 12:], atol=1e-4)
    within = feed(tokens[:, :16], (12, 4), length=16)[1]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), after, within)
    for position in (16, 1000, -8):
        _, untouched = apply()(state, tokens[:, :8], ints(position, position, position), ints(8, 8, 8))
        jax.tree.map(np.testing.assert_array_equal, state, untouched)


def test_runs_under_scan_vmap_and_rows_can_be_gathered():
    tokens = text(3, 12)
    expected, _ = feed(tokens, (1,) * 12)

    def step(state, token_and_position):
        token, position = token_and_position
        logits, state = tiny().apply(state, token[:, None], jnp.full(3, position), ints(1, 1, 1))
        return state, logits[:, 0]

    scanned = jax.lax.scan(step, tiny().init_cache(3, 64), (tokens.T, jnp.arange(12, dtype=jnp.int32)))[1]
    np.testing.assert_allclose(scanned.swapaxes(0, 1), expected, atol=1e-4)
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), tiny().init_cache(3, 64))
    both = jax.jit(jax.vmap(tiny().apply, in_axes=(0, None, None, None)))(
        stacked, tokens, ints(0, 0, 0), ints(12, 12, 12)
    )[0]
    np.testing.assert_allclose(both[1], expected, atol=1e-4)
    assert all(leaf.shape[0] == 3 for leaf in jax.tree.leaves(tiny().init_cache(3, 64)))


def test_greedy_continuation_is_that_of_the_full_forward_pass():
    prompts = np.asarray(text(3, 12))
    rows = evaluation.continuations(tiny(), prompts, 20, temperature=0.0)
    np.testing.assert_array_equal(rows[:, :12], prompts)
    logits = np.asarray(forward(TINY, tiny().params, jnp.asarray(rows)))
    np.testing.assert_array_equal(logits.argmax(-1)[:, 11:-1], rows[:, 12:])
    drawn = evaluation.continuations(tiny(), prompts, 20, 1.0, seed=1)
    assert (drawn != rows).any() and (drawn < TINY.vocab_size).all()


# ---- text and tokenizer


@hypothesis.given(st.text(max_size=200))
@hypothesis.example("a <|endoftext|> b\r\n\t\x00 \u200b \U0001f600")
def test_every_text_round_trips(sample):
    tokenizer = shipped_tokenizer()
    tokens = tokenizer.encode(sample)
    assert tokenizer.decode(tokens) == sample
    assert tokenizer.eos not in tokens
    assert tokenizer.encode_batch([sample]) == [tokens]
    assert tokenizer.decode([*tokens, tokenizer.eos, -1, -1]) == sample


def test_tokenizer_refuses_foreign_ids_and_files(tmp_path):
    with pytest.raises(ValueError, match="ids below 2048, got 9999"):
        shipped_tokenizer().decode([9999])
    for content in ("", "{", json.dumps({"model": 1})):
        (tmp_path / "t.json").write_text(content)
        with pytest.raises(ValueError, match="not a readable tokenizer file"):
            load_tokenizer(tmp_path / "t.json")
    with pytest.raises(FileNotFoundError):
        load_tokenizer(tmp_path / "none.json")


def test_a_trained_tokenizer_is_saved_and_loaded(tmp_path):
    sample = "def f(x):\n    return x + 1\n" * 20
    tokenizer = train_tokenizer([sample], 300)
    tokenizer.save(tmp_path / "t.json")
    loaded = load_tokenizer(tmp_path / "t.json")
    assert loaded.encode(sample) == tokenizer.encode(sample)
    assert len(loaded.encode(sample)) < len(sample) / 2


@cache
def shipped_tokenizer():
    return load_tokenizer()


@cache
def side(held_out):
    return tuple(corpus.documents(held_out))


def test_the_sides_are_disjoint_and_deterministic():
    training, held = side(False), side(True)
    assert not {doc.name for doc in training} & {doc.name for doc in held}
    assert not {doc.text for doc in training if len(doc.text) > 200} & {doc.text for doc in held}
    assert tuple(corpus.documents(True)) == held
    share = sum(len(doc.text) for doc in held) / sum(len(doc.text) for doc in (*training, *held))
    assert 0.03 < share < 0.25
    for workload in corpus.PACKAGED:
        assert sum(len(doc.text) for doc in held if doc.workload == workload) > 50_000
    names = [doc.name for doc in (*training, *held)]
    assert not [n for n in names if "site-packages" in n or "/test/" in n or n.startswith("encodings")]


def test_held_out_prose_is_not_quoted_in_training_prose():
    quoted = {p for doc in side(True) if doc.workload == "prose" for p in doc.text.split("\n\n") if len(p) > 80}
    training = "\n\n".join(doc.text for doc in side(False) if doc.workload == "prose")
    assert quoted and not [p for p in quoted if f"\n\n{p.strip()}\n\n" in training]


def test_a_module_keeps_its_side_when_it_moves():
    # By the name alone, so these values hold on every machine and Python.
    assert [corpus.is_held_out(n) for n in ("inspect.py", "typing.py", "topics/while")] == [True, False, True]
    for old, new in [
        ("zipfile.py", "zipfile/__init__.py"),
        ("datetime.py", "_pydatetime.py"),
        ("pathlib.py", "pathlib/_local.py"),
        ("inspect.py", "inspect/__init__.py"),
    ]:
        assert corpus.is_held_out(old) == corpus.is_held_out(new)
    assert sum(corpus.is_held_out(f"m{i}.py") for i in range(10_000)) == pytest.approx(1000, abs=150)


@pytest.mark.parametrize("workload", corpus.PACKAGED)
def test_prompts_are_seeded_and_start_at_lines_of_held_out_text(workload):
    tokenizer = shipped_tokenizer()
    prompts = corpus.held_out_prompts(tokenizer, workload, 16, 48, seed=4)
    assert prompts.shape == (16, 48) and prompts.dtype == np.int32
    np.testing.assert_array_equal(prompts, corpus.held_out_prompts(tokenizer, workload, 16, 48, seed=4))
    assert (prompts != corpus.held_out_prompts(tokenizer, workload, 16, 48, seed=5)).any()
    texts = ["\n" + doc.text for doc in side(True) if doc.workload == workload]
    for row in prompts:
        start = tokenizer.decode(row).rstrip("\ufffd")  # a window may end inside a character
        assert any("\n" + start in held for held in texts)


def test_prompts_name_what_is_missing():
    tokenizer = shipped_tokenizer()
    with pytest.raises(ValueError, match="expected one of code, prose"):
        corpus.held_out_prompts(tokenizer, "poems", 1, 8)
    with pytest.raises(ValueError, match="'maths' needs data"):
        corpus.held_out_prompts(tokenizer, "maths", 1, 8)
    with pytest.raises(ValueError, match="1000000 were asked for"):
        corpus.held_out_prompts(tokenizer, "prose", 1_000_000, 8)


def test_a_data_folder_adds_text(tmp_path):
    with pytest.raises(FileNotFoundError, match="not a folder"):
        corpus.documents(True, tmp_path / "none")
    with pytest.raises(FileNotFoundError, match=r"holds none of gsm8k_train\.jsonl"):
        corpus.documents(True, tmp_path)
    record = {"question": "Two and two?", "answer": "#### 4"}
    (tmp_path / "gsm8k_train.jsonl").write_text(json.dumps(record) + "\n")
    (tmp_path / "gsm8k_test.jsonl").write_text(json.dumps(record | {"question": "One?"}) + "\n")
    assert [d.text for d in corpus.documents(False, tmp_path) if d.workload == "maths"] == ["Two and two?\n#### 4\n"]
    assert [d.text for d in corpus.documents(True, tmp_path) if d.workload == "maths"] == ["One?\n#### 4\n"]
    (tmp_path / "gsm8k_test.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match="line 1: not a record"):
        corpus.documents(True, tmp_path)
    (tmp_path / "gsm8k_test.jsonl").write_text("{")
    with pytest.raises(ValueError, match="line 1: not JSON"):
        corpus.documents(True, tmp_path)


def test_the_token_stream_separates_documents():
    tokenizer = shipped_tokenizer()
    docs = [corpus.Document("a", "code", "x = 1\n"), corpus.Document("b", "code", "y\n")]
    stream = corpus.token_stream(tokenizer, docs)
    expected = [*tokenizer.encode("x = 1\n"), tokenizer.eos, *tokenizer.encode("y\n"), tokenizer.eos]
    assert stream.tolist() == expected and stream.dtype == np.uint16


# ---- checkpoints and training


def test_checkpoints_round_trip_in_every_dtype(tmp_path):
    tree = {
        "a": {"b": jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3) / 7, "c": np.float32([1.5, np.nan])},
        "d": np.int32(4),
    }
    save_tree(tmp_path / "c.npz", tree, {"note": [1, "x"]})
    loaded, meta = load_tree(tmp_path / "c.npz")
    assert meta == {"note": [1, "x"]}
    jax.tree.map(np.testing.assert_array_equal, loaded, jax.tree.map(np.asarray, tree))
    assert loaded["a"]["b"].dtype == jnp.bfloat16
    assert os.listdir(tmp_path) == ["c.npz"]
    with pytest.raises(ValueError, match="plain names"):
        save_tree(tmp_path / "d.npz", {"a/b": np.zeros(1)}, {})
    with pytest.raises(ValueError, match="plain names"):
        save_tree(tmp_path / "d.npz", [np.zeros(1)], {})


@hypothesis.given(st.data())
def test_a_damaged_model_is_refused(tmp_path_factory, data):
    content = tiny_checkpoint()
    kind = data.draw(st.sampled_from(["cut", "flip", "garbage"]))
    if kind == "cut":
        damaged = content[: data.draw(st.integers(0, len(content) - 1))]
    elif kind == "garbage":
        damaged = data.draw(st.binary(max_size=300))
    else:
        # Inside an array's numbers, the only place where a changed byte could go unnoticed.
        at = content.index(tiny_bytes()) + data.draw(st.integers(0, 1000))
        damaged = content[:at] + bytes([content[at] ^ 64]) + content[at + 1 :]
    path = tmp_path_factory.mktemp("damaged") / "target.npz"
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match="damaged, or not a checkpoint"):
        models.load_model(path)


@cache
def tiny_checkpoint():
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tiny().params)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "target.npz"
        save_tree(path, params, {"config": TINY._asdict()})
        assert models.load_model(path).config == TINY
        return path.read_bytes()


def tiny_bytes():
    return np.asarray(tiny().params["embedding"].astype(jnp.bfloat16)).tobytes()


def test_other_files_are_not_models(tmp_path):
    path = tmp_path / "target.npz"
    with pytest.raises(FileNotFoundError):
        models.load_model(path)
    np.savez(path, a=np.zeros(3))
    with pytest.raises(ValueError, match="not a checkpoint"):
        models.load_model(path)
    np.savez(path, a=np.array([{"pickled": 1}], dtype=object))
    with pytest.raises(ValueError, match="not a checkpoint"):
        models.load_model(path)
    save_tree(path, tiny().params, {"config": {"depth": 3}})
    with pytest.raises(ValueError, match="not an exported model"):
        models.load_model(path)
    save_tree(path, tiny().params, {"config": TINY._replace(mlp_size=32)._asdict()})
    with pytest.raises(ValueError, match="do not fit"):
        models.load_model(path)


class Interrupted(Exception):
    pass


def interrupt_after(monkeypatch, step):
    original = train._batch

    def batch(stream, recipe, at):
        if at == step:
            raise Interrupted
        return original(stream, recipe, at)

    monkeypatch.setattr(train, "_batch", batch)


@pytest.mark.parametrize("plain_steps", [None, 3])
def test_resuming_equals_an_uninterrupted_run_bit_for_bit(tmp_path, monkeypatch, plain_steps):
    recipe = RECIPE._replace(plain_steps=plain_steps)
    save_tree(tmp_path / "target.npz", tiny().params, {"config": TINY._asdict()})
    whole = train.train("a", recipe, tmp_path, tmp_path, save_every=2, stream=STREAM)
    with monkeypatch.context() as patch:
        interrupt_after(patch, 5)
        with pytest.raises(Interrupted):
            train.train("b", recipe, tmp_path, tmp_path, save_every=2, stream=STREAM)
    assert load_tree(tmp_path / "b.npz")[1]["step"] == 4
    resumed = train.train("b", recipe, tmp_path, tmp_path, save_every=2, stream=STREAM)
    jax.tree.map(np.testing.assert_array_equal, whole, resumed)
    start = models.init_params(TINY, recipe.seed)
    assert np.abs(np.asarray(whole["embedding"] - start["embedding"])).max() > 1e-4
    # A finished run is finished.
    again = train.train("b", recipe, tmp_path, tmp_path, save_every=2, stream=STREAM)
    jax.tree.map(np.testing.assert_array_equal, whole, again)


def test_a_checkpoint_of_other_settings_is_refused(tmp_path):
    train.train("a", RECIPE, tmp_path, tmp_path, stream=STREAM)
    with pytest.raises(ValueError, match=r"made with another peak_rate; --fresh"):
        train.train("a", RECIPE._replace(peak_rate=1.0), tmp_path, tmp_path, stream=STREAM)
    with pytest.raises(ValueError, match="made with another data"):
        train.train("a", RECIPE, tmp_path, tmp_path, stream=STREAM[1:])
    with pytest.raises(ValueError, match="already falling"):
        train.train("a", RECIPE._replace(steps=20), tmp_path, tmp_path, stream=STREAM)
    (tmp_path / "a.npz").write_bytes((tmp_path / "a.npz").read_bytes()[:-100])
    with pytest.raises(ValueError, match="damaged"):
        train.train("a", RECIPE, tmp_path, tmp_path, stream=STREAM)
    train.train("a", RECIPE, tmp_path, tmp_path, stream=STREAM, fresh=True)


def test_training_learns(tmp_path):
    stream = np.tile(np.arange(40, dtype=np.uint16), 50)
    recipe = RECIPE._replace(steps=60, batch=8, warmup=10)
    params = train.train("a", recipe, tmp_path, tmp_path, stream=stream)
    logits = forward(TINY, params, jnp.arange(20, dtype=jnp.int32)[None])
    assert (jnp.argmax(logits, -1)[0] == jnp.arange(1, 21)).mean() > 0.9


# ---- what is shipped


@cache
def shipped_pair():
    return models.load_pair()


def test_shipped_files_are_small_and_fit_together():
    folder = models.CHECKPOINTS
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 5_000_000
    target, draft, tokenizer = shipped_pair()
    sizes = [sum(leaf.size for leaf in jax.tree.leaves(m.params)) for m in (target, draft)]
    assert 1_700_000 <= sizes[0] <= 2_000_000 and 200_000 <= sizes[1] <= 400_000
    assert target.config.vocab_size == draft.config.vocab_size == tokenizer.vocab_size == 2048
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves((target.params, draft.params)))
    for name, size in zip(("target", "draft"), sizes, strict=True):
        report = json.loads((folder / f"{name}.json").read_text())
        assert report["parameters"] == size and report["step"] == report["steps"]
        assert report["bytes"] == (folder / f"{name}.npz").stat().st_size


def test_shipped_pair_on_held_out_text():
    target, draft, tokenizer = shipped_pair()
    for workload, windows in evaluation.held_out_windows(tokenizer, num_windows=24).items():
        alpha = evaluation.acceptance(target, draft, windows).mean()
        assert 0.6 <= alpha <= 0.85, (workload, alpha)
        report = json.loads((models.CHECKPOINTS / "target.json").read_text())["held_out_loss"]
        loss = evaluation.held_out_loss(target, windows)
        assert abs(loss - report[workload]) < 0.6 and loss < 4.0


def test_pair_of_different_vocabularies_is_refused(tmp_path):
    shipped_tokenizer().save(tmp_path / "tokenizer.json")
    save_tree(tmp_path / "target.npz", tiny().params, {"config": TINY._asdict()})
    save_tree(tmp_path / "draft.npz", tiny().params, {"config": TINY._asdict()})
    with pytest.raises(ValueError, match="different vocabularies"):
        models.load_pair(tmp_path)


def test_command_line_reports_errors_without_a_traceback(tmp_path):
    with pytest.raises(SystemExit, match=r"error: .*none is not a folder"):
        train.main(["tokenizer", "--data", str(tmp_path / "none"), "--out", str(tmp_path)])
