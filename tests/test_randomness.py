"""Exact draws, and keys that belong to a token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from specav import randomness
from tests.laws import LEVEL, at_total_variation, chi_square

many = jax.jit(jax.vmap(randomness.categorical, in_axes=(0, None)))


def draws(weights, number, seed=0):
    return np.asarray(many(jax.random.split(jax.random.key(seed), number), jnp.asarray(weights, jnp.float32)))


@given(
    st.sampled_from([1, 2, 5, 8]).flatmap(
        lambda size: st.lists(st.sampled_from([0.0, 1e-38, 1e-12, 0.3, 1.0, 7.0, 1e30]), min_size=size, max_size=size)
    ),
    st.integers(0, 2**31 - 1),
)
def test_a_weight_of_zero_is_never_drawn(weights, seed):
    drawn = draws(weights, 64, seed)
    assert ((drawn >= 0) & (drawn < len(weights))).all()
    if any(weights):
        assert all(weights[i] > 0 for i in drawn)
    else:
        assert (drawn == 0).all()


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13])
def test_draws_follow_the_weights_and_a_fault_is_seen(size):
    law = np.random.default_rng(size).dirichlet(np.full(size, 0.7))
    counts = np.bincount(draws(law * 3.7, 400_000), minlength=size)
    test = chi_square(counts, law)
    assert test.passed and test.detectable_tv < 0.02
    if size > 1:
        assert not chi_square(counts, at_total_variation(law, 0.02)).passed


def rare_test(draw, number=2_000_000, chunk=5_000):
    """p-value for the number of times 1,000 tokens of weight 1e-7 are drawn beside one of weight 1."""
    weights = jnp.full((1001,), 1e-7, jnp.float32).at[500].set(1.0)

    @jax.jit
    def hits(key):
        def one(count, key):  # small chunks stay in the cache
            drawn = jax.vmap(lambda k: draw(k, weights))(jax.random.split(key, chunk))
            return count + jnp.sum(drawn != 500), None

        return jax.lax.scan(one, 0, jax.random.split(key, number // chunk))[0]

    return stats.binomtest(int(hits(jax.random.key(0))), number, 1e-4 / (1 + 1e-4)).pvalue


def test_rare_tokens_keep_their_mass_and_a_loss_of_two_fifths_is_seen():
    assert rare_test(randomness.categorical) > LEVEL
    lossy = lambda key, weights: randomness.categorical(key, jnp.where(weights < 1, 0.6 * weights, weights))  # noqa: E731
    assert rare_test(lossy) < LEVEL


@pytest.mark.slow
def test_the_default_gumbel_draw_loses_rare_tokens():
    # Its uniforms are multiples of 2^-23: some 40 % of that mass is lost.
    assert rare_test(lambda key, weights: jax.random.categorical(key, jnp.log(weights))) < LEVEL


def test_bernoulli_resolves_probabilities_below_the_float32_grid():
    for probability in (1e-5, 3e-7):
        trial = jax.jit(
            lambda key, p=probability: jnp.sum(
                jax.vmap(lambda k: randomness.bernoulli(k, jnp.float32(p)))(jax.random.split(key, 1_000_000))
            )
        )
        hits = sum(int(trial(jax.random.key(seed))) for seed in range(10))
        assert stats.binomtest(hits, 10_000_000, probability).pvalue > LEVEL


def test_bernoulli_is_sure_at_the_ends_and_refuses_nan():
    keys = jax.random.split(jax.random.key(3), 1000)
    sure = jax.vmap(lambda k, p: randomness.bernoulli(k, p), (0, None))
    assert sure(keys, jnp.float32(1)).all() and sure(keys, jnp.float32(2)).all()
    for never in (0.0, -1.0, float("nan")):
        assert not sure(keys, jnp.float32(never)).any()


def test_one_key_is_folded_by_row_and_raw_keys_are_taken():
    keys = randomness.request_keys(jax.random.key(1), 3)
    assert keys.shape == (3,) and len(np.unique(jax.random.key_data(keys), axis=0)) == 3
    raw = randomness.request_keys(jax.random.PRNGKey(1), 3)
    assert (jax.random.key_data(raw) == jax.random.key_data(keys)).all()
    same = randomness.request_keys(jax.random.key_data(keys), 3)
    assert (jax.random.key_data(same) == jax.random.key_data(keys)).all()


def test_keys_differ_by_request_position_purpose_and_commitment():
    keys = randomness.request_keys(jax.random.key(0), 2)[jnp.asarray([0, 0, 0, 1])]
    position = jnp.asarray([5, 6, 5, 5])
    seen = [jax.random.key_data(randomness.verdict_keys(keys, position, purpose)) for purpose in range(4)]
    seen += [jax.random.key_data(randomness.draft_keys(keys, position, jnp.full((4,), c))) for c in (3, 4)]
    rows = np.concatenate([np.asarray(s)[[0, 1, 3]] for s in seen])
    assert len(np.unique(rows, axis=0)) == len(rows)
    assert all((np.asarray(s)[0] == np.asarray(s)[2]).all() for s in seen)


def test_bad_keys_are_refused(own_checks):
    with pytest.raises(TypeError, match="key: expected a JAX PRNG key"):
        randomness.request_keys(3, 2)
    with pytest.raises(TypeError, match=r"key: .*float32"):
        randomness.request_keys(jnp.ones(2), 2)
    with pytest.raises(ValueError, match=r"key: expected one key or keys \[B=2\], got keys \[3\]"):
        randomness.request_keys(jax.random.split(jax.random.key(0), 3), 2)


@pytest.mark.parametrize("size", [1, 5, 1001, 150_000])
def test_weights_are_padded_once_whatever_the_vocabulary(size):
    # Padding the odd levels of the tree one by one made XLA (jax 0.12, CPU) compile for minutes at V = 1001.
    jaxpr = jax.make_jaxpr(randomness.categorical)(jax.random.key(0), jnp.ones((size,), jnp.float32))
    pads = str(jaxpr).count(" pad[")
    assert pads <= 1
