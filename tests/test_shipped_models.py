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
from tests.helpers import choice

WIDTH, BATCH, PROMPT = 7, 8, 24
ROOM, GREEDY = 512, 256  # new tokens
COSTS = cost_table(np.asarray([8, 16, 24, 32, 64]), np.asarray([1.0, 1.1, 1.4, 1.8, 3.0]))


def random_trimming(state, inputs):
    """Any number of drafts, by noise and by the tokens drawn."""
    key, sub = jax.random.split(state)
    n = jax.random.randint(sub, inputs.num_drafts.shape, 0, inputs.num_drafts + 1)
    return jnp.where(inputs.draft_tokens[:, 0] % 3 == 0, 0, n), key


POLICIES = {
    "everything": policies.everything(),
    "random trimming": policies.everything()._replace(
        init=lambda: jax.random.key(7), decide=random_trimming, window="block", reads=("draft_tokens",)
    ),
    "live argmax": policies.live_argmax(COSTS),
    "nothing but the free row": policies.nothing(),
}


FIXED = policies.fixed(3)


@functools.cache
def pair():
    target, draft, tokenizer = load_pair()
    prompts = held_out_prompts(tokenizer, "code", BATCH, PROMPT, seed=1)
    lengths = PROMPT - np.arange(BATCH) % 3  # ragged
    return target, draft, jnp.asarray(prompts), jnp.asarray(lengths, jnp.int32)


@functools.cache
def program(rule):
    """One compiled loop per rule: the policy, the temperature and the numbers of new tokens are arguments."""
    target, draft, prompts, lengths = pair()

    @jax.jit
    def decode(keys, policy, temperature, limits):
        loop = decoder(
            target.apply,
            autoregressive_drafter(draft.apply, WIDTH),
            num_draft_tokens=WIDTH,
            max_new_tokens=ROOM,
            policy=choice(POLICIES.values() if rule == "deferred" else [FIXED]),
            rule=rule,
            sampling=SamplingParams(temperature),
            draft_sampling=SamplingParams(1.0),
            require_lossless=rule
            == "deferred",  # of the choice; under the other rules "everything" or "fixed" is taken
        )
        caches = target.init_cache(BATCH, PROMPT + ROOM), draft.init_cache(BATCH, PROMPT + ROOM)
        state = loop.init(keys, prompts, lengths, *caches, token_limits=limits)
        state = loop.run(state._replace(policy=(policy, state.policy[1])))
        return state.tokens, state.statistics

    return decode


@functools.cache
def run(policy, rule, new_tokens, temperature=1.0):
    keys = jax.random.split(jax.random.key(0), BATCH)
    index = jnp.asarray(list(POLICIES).index(policy) if rule == "deferred" else 0, jnp.int32)
    limits = jnp.full((BATCH,), new_tokens, jnp.int32)
    return jax.tree.map(np.asarray, program(rule)(keys, index, jnp.float32(temperature), limits))


@pytest.mark.parametrize("name", ["random trimming", "live argmax", "nothing but the free row"])
def test_deferral_emits_bitwise_what_verifying_everything_emits(name):
    everything, trimmed = run("everything", "deferred", ROOM), run(name, "deferred", ROOM)
    differences = int((everything[0] != trimmed[0]).sum())
    fed = int(trimmed[1].verified.sum()), int(everything[1].verified.sum())
    rounds = int(trimmed[1].rounds.sum()), int(everything[1].rounds.sum())
    print(f"{name}: {differences} of {BATCH * ROOM} tokens differ; verified {fed[0]} of {fed[1]}, rounds {rounds}")
    assert differences == 0
    assert fed[0] < 0.8 * fed[1]


@functools.cache
def greedy_continuation():
    target, _, prompts, lengths = pair()

    @jax.jit
    def greedy():
        cache = target.init_cache(BATCH, PROMPT + GREEDY)
        logits, cache = target.apply(cache, prompts, jnp.zeros_like(lengths), lengths)
        first = jnp.argmax(jnp.take_along_axis(logits, (lengths - 1)[:, None, None], axis=1)[:, 0], axis=-1)

        def one(carry, _):
            cache, token, position = carry
            logits, cache = target.apply(cache, token[:, None], position, jnp.ones_like(position))
            following = jnp.argmax(logits[:, 0], axis=-1).astype(jnp.int32)
            return (cache, following, position + 1), token

        return jax.lax.scan(one, (cache, first.astype(jnp.int32), lengths), length=GREEDY)[1].T

    return np.asarray(greedy())


@pytest.mark.parametrize("rule", ["standard", "coupled", "deferred"])
def test_a_greedy_target_gives_exactly_its_greedy_continuation(rule):
    tokens, _ = run("everything" if rule == "deferred" else "fixed", rule, GREEDY, temperature=0.0)
    for row, length, wanted in zip(tokens, np.asarray(pair()[3]), greedy_continuation(), strict=True):
        np.testing.assert_array_equal(row[length : length + GREEDY], wanted)
