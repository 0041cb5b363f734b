"""The decoding loop on the shipped models: greedy continuation, and deferral bit for bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.corpus import held_out_prompts
from experiments.models import load_pair
from specav import policies
from specav.costs import cost_table
from specav.decode import decoder
from specav.drafting import autoregressive_drafter
from specav.sampling import SamplingParams

WIDTH, BATCH, PROMPT = 7, 8, 24
COSTS = cost_table(np.asarray([8, 16, 24, 32, 64]), np.asarray([1.0, 1.1, 1.4, 1.8, 3.0]))


@functools.cache
def pair():
    target, draft, tokenizer = load_pair()
    prompts = held_out_prompts(tokenizer, "code", BATCH, PROMPT, seed=1)
    lengths = PROMPT - np.arange(BATCH) % 3  # ragged
    return target, draft, jnp.asarray(prompts), jnp.asarray(lengths, jnp.int32)


@functools.cache
def run(policy, rule, new_tokens, temperature=1.0):
    target, draft, prompts, lengths = pair()
    loop = decoder(
        target.apply,
        autoregressive_drafter(draft.apply, WIDTH),
        num_draft_tokens=WIDTH,
        max_new_tokens=new_tokens,
        policy=policy,
        rule=rule,
        sampling=SamplingParams(temperature),
        draft_sampling=SamplingParams(1.0),
    )

    @jax.jit
    def decode(keys):
        length = PROMPT + new_tokens
        caches = target.init_cache(BATCH, length), draft.init_cache(BATCH, length)
        return loop.run(loop.init(keys, prompts, lengths, *caches))

    state = decode(jax.random.split(jax.random.key(0), BATCH))
    return jax.tree.map(np.asarray, state._replace(keys=None, target=None, drafter=None, kept=None, policy=None))


def random_trimming(state, inputs):
    """Any number of drafts, by noise and by the tokens drawn."""
    key, sub = jax.random.split(state)
    n = jax.random.randint(sub, inputs.num_drafts.shape, 0, inputs.num_drafts + 1)
    return jnp.where(inputs.draft_tokens[:, 0] % 3 == 0, 0, n), key


POLICIES = {
    "random trimming": policies.everything()._replace(
        init=lambda: jax.random.key(7), decide=random_trimming, window="block", reads=("draft_tokens",)
    ),
    "live argmax": policies.live_argmax(COSTS),
    "nothing but the free row": policies.nothing(),
}
EVERYTHING = policies.everything()


@pytest.mark.parametrize("name", POLICIES)
def test_deferral_emits_bitwise_what_verifying_everything_emits(name):
    everything, trimmed = run(EVERYTHING, "deferred", 512), run(POLICIES[name], "deferred", 512)
    differences = int((everything.tokens != trimmed.tokens).sum())
    fed = int(trimmed.statistics.verified.sum()), int(everything.statistics.verified.sum())
    rounds = int(trimmed.statistics.rounds.sum()), int(everything.statistics.rounds.sum())
    print(f"{name}: {differences} of {BATCH * 512} tokens differ; verified {fed[0]} of {fed[1]}, rounds {rounds}")
    assert differences == 0
    assert fed[0] < 0.8 * fed[1]


@pytest.mark.parametrize("rule", ["standard", "coupled", "deferred"])
def test_a_greedy_target_gives_exactly_its_greedy_continuation(rule):
    target, _, prompts, lengths = pair()
    new_tokens = 256

    @jax.jit
    def greedy():
        cache = target.init_cache(BATCH, PROMPT + new_tokens)
        logits, cache = target.apply(cache, prompts, jnp.zeros_like(lengths), lengths)
        first = jnp.argmax(jnp.take_along_axis(logits, (lengths - 1)[:, None, None], axis=1)[:, 0], axis=-1)

        def one(carry, _):
            cache, token, position = carry
            logits, cache = target.apply(cache, token[:, None], position, jnp.ones_like(position))
            following = jnp.argmax(logits[:, 0], axis=-1).astype(jnp.int32)
            return (cache, following, position + 1), token

        return jax.lax.scan(one, (cache, first.astype(jnp.int32), lengths), length=new_tokens)[1].T

    state = run(policies.fixed(3) if rule == "standard" else EVERYTHING, rule, new_tokens, temperature=0.0)
    expected = np.asarray(greedy())
    for row, length, wanted in zip(state.tokens, np.asarray(lengths), expected, strict=True):
        np.testing.assert_array_equal(row[length : length + new_tokens], wanted)
