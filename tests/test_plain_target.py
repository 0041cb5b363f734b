"""The example with a plain function as target: its models are what they claim, and it decodes their law."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import plain_target
from specav import policies
from specav.decode import speculative_decode
from specav.drafting import autoregressive_drafter
from specav.sampling import SamplingParams

V = len(plain_target.ALPHABET)


@pytest.fixture(scope="module")
def tables():
    return plain_target.count_ngrams(plain_target.read_text(), 4)


def test_tables_are_laws_that_favour_what_is_written(tables):
    assert [table.shape for table in tables] == [(V,) * n for n in (1, 2, 3, 4)]
    for table in tables:
        np.testing.assert_allclose(jnp.sum(jnp.exp(table), axis=-1), 1.0, rtol=1e-4)
    after = lambda text: tables[-1][tuple(plain_target.ALPHABET.index(letter) for letter in text)]  # noqa: E731
    assert plain_target.ALPHABET[int(jnp.argmax(after(" th")))] == "e"


def test_model_forgets_what_was_rolled_back(tables):
    """Rows after a roll-back equal those of a text that never saw the rejected letters."""
    model = plain_target.table_model(tables[-1])
    state = jnp.zeros((1, 9), jnp.int32)
    feed = lambda state, letters, at, real: model(  # noqa: E731
        state, jnp.array([letters], jnp.int32), jnp.array([at]), jnp.array([real])
    )
    _, state = feed(state, [3, 1, 4], 0, 3)
    _, state = feed(state, [4, 9, 9, 9], 2, 2)  # 9 at position 3 is rejected; two rows were not even real
    logits, state = feed(state, [5, 2], 3, 2)
    np.testing.assert_array_equal(logits[0, 0], tables[-1][1, 4, 5])
    np.testing.assert_array_equal(logits[0, 1], tables[-1][4, 5, 2])
    np.testing.assert_array_equal(state[0], [3, 1, 4, 5, 2, 0, 0, 0, 0])
    logits, _ = feed(jnp.full((1, 9), 7, jnp.int32), [3], 0, 1)  # blanks stand before the text
    np.testing.assert_array_equal(logits[0, 0], tables[-1][0, 0, 3])


def test_greedy_decoding_is_the_greedy_text(tables):
    num_tokens, prompt = 40, [20, 8, 5, 0]
    cache = jnp.zeros((1, len(prompt) + num_tokens), jnp.int32)
    state = jax.jit(
        lambda key: speculative_decode(
            key,
            jnp.array([prompt], jnp.int32),
            jnp.array([len(prompt)]),
            plain_target.table_model(tables[-1]),
            cache,
            autoregressive_drafter(plain_target.table_model(tables[-2]), 3),
            cache,
            num_draft_tokens=3,
            max_new_tokens=num_tokens,
            policy=policies.fixed(2),
            sampling=SamplingParams(0.0),
            draft_sampling=SamplingParams(1.0),
        )
    )(jax.random.key(0))
    text = list(prompt)
    for _ in range(num_tokens):
        text.append(int(jnp.argmax(tables[-1][tuple(text[-3:])])))
    assert state.tokens[0].tolist() == text


def test_the_printed_table(capsys):
    rows = plain_target.main(["--tokens", "300", "--batch", "16", "--fixed", "6"])
    everything, trimmed = rows
    assert [row.name for row in rows] == ["fixed(6)", "trimmer"]
    printed = capsys.readouterr().out
    assert all(row.name in printed and f"{row.tokens_per_round:.2f}" in printed for row in rows)
    assert 2 < everything.tokens_per_round < 7 and 1 < trimmed.tokens_per_round < everything.tokens_per_round
    # Trimming must pay under the costs it was given. Over six runs (three seeds, two versions of the help text) it
    # verified .51 to .54 of the drafts and was 1.12 to 1.24 times as fast; shorter runs scatter down to 1.05.
    assert trimmed.verified_per_round < 0.6 * everything.verified_per_round
    assert trimmed.tokens_per_time > 1.03 * everything.tokens_per_time
    assert all(len(row.text) == 304 and row.text.startswith("the ") for row in rows)
