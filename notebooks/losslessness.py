# ---
# jupyter:
#   jupytext:
#     formats: py:percent,ipynb
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Is my policy lossless?
#
# You have a function that decides how many drafts of each request are verified. Does the output still follow the
# target's law? Four answers, from a proof to an alarm in production.
#
# ## A verdict in ten lines

# %%
import jax.numpy as jnp

from specav import lossless, policies


def decide(state, inputs):
    sure = inputs.features.logit_q_sampled > 0.0  # the drawn token has probability above one half
    return jnp.sum(jnp.cumprod(sure.astype(jnp.int32), axis=1), axis=1), state


mine = policies.from_function(decide, name="mine")
for rule in ("standard", "coupled", "deferred"):
    print(f"{rule:9s}", lossless.certify(mine, rule=rule), "\n")

# %% [markdown]
# `certify` traced the function for 64 requests and 8 drafts, and followed every element through the trace. Under the
# standard rule it found that whether draft i is verified depends on draft i itself, and then a concrete pair of inputs
# on which the decision moves. Under the coupled rule nothing forbidden is read, and that is a proof.
#
# The same question asked of behaviour instead of code, which also works for functions that cannot be analysed:

# %%
print(lossless.check_non_anticipating(mine, rule="standard"))

# %% [markdown]
# ## How large is the leak?
#
# For tabular models the law of what is emitted can be enumerated, in float64, over several rounds. Here a target and a
# draft over three tokens, and the first three tokens of the output.

# %%
import numpy as np

rng = np.random.default_rng(0)
target = lossless.markov_model(rng.normal(size=(3, 3)) * 2)
draft = lossless.markov_model(rng.normal(size=(3, 3)) * 2)
for rule in ("standard", "coupled", "deferred"):
    output = lossless.exact_output_law(mine, draft, target, rule=rule, num_draft_tokens=2, num_tokens=3)
    print(f"{rule:9s} total variation {lossless.total_variation(output)[0]:.2g} over {output.num_paths} paths")
    if rule == "standard":
        print("          ", lossless.largest_bias(output))

# %% [markdown]
# The prefix with the largest bias names what is drawn too often or too rarely. Under the coupled and the deferred rule
# the total variation is that of rounding.
#
# ## An alarm in production
#
# Real vocabularies cannot be enumerated. The monitor bets, token by token, that emitted tokens lean towards the drafter
# (or away from it). An exact decoder raises the alarm with a probability of at most the level, however often one looks.

# %%
import jax
import matplotlib.pyplot as plt

from specav.decode import decoder
from specav.drafting import autoregressive_drafter
from specav.sampling import SamplingParams

V, K, B, ROUNDS = 20, 4, 64, 150
keys = jax.random.split(jax.random.key(0), 3)
target_table = jax.random.normal(keys[0], (V, V)) * 2
draft_table = 0.5 * target_table + jax.random.normal(keys[1], (V, V))


def table_model(table):
    return lambda state, tokens, positions, num_tokens: (table[tokens], state)


def watch(rule, policy):
    loop = decoder(
        table_model(target_table),
        autoregressive_drafter(table_model(draft_table), K),
        num_draft_tokens=K,
        max_new_tokens=ROUNDS * (K + 1),
        policy=policy,
        rule=rule,
        sampling=SamplingParams(1.0),
        require_lossless=False,
    )
    monitor = lossless.lossless_monitor(level=0.01)

    def one_round(carry, _):
        state, watched = carry
        state, info = loop.step(state)
        watched = monitor.update(watched, *lossless.round_evidence(info))
        return (state, watched), (watched.total, watched.num_tokens)

    state = loop.init(keys[2], jnp.zeros((B, 1), jnp.int32), jnp.ones((B,), jnp.int32), (), ())
    return jax.jit(lambda s: jax.lax.scan(one_round, (s, monitor.init()), None, length=ROUNDS))(state)


drawn = policies.threshold("logit_q_sampled", -1.5)  # about half of the drafts
figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
for rule in ("standard", "coupled"):
    (_, watched), (wealth, number) = watch(rule, drawn)
    axes.semilogy(number, wealth, label=f"{rule} rule")
    print(f"{rule:9s} alarm: {bool(watched.alarm)} after at most {int(watched.num_tokens)} tokens")
axes.axhline(100, color="black", linewidth=0.8, linestyle=":")
axes.set(xlabel="tokens", ylabel="wealth", title="Discarding unlikely draws: wealth of the monitor (alarm at 100)")
axes.legend()
# %% [markdown]
# ## What others do
#
# `specav.lossless.CATALOGUE` holds the decisions of published systems; `python -m experiments.losslessness` prints the
# verdict on each under all three rules, with the total variation.

# %%
for practice in lossless.CATALOGUE[:8]:
    policy = practice.policy(4, 3)
    verdicts = [
        lossless.certify(
            policy,
            rule=rule,
            drafter=practice.scheme,
            num_requests=4,
            num_draft_tokens=3,
            acceptance_depends_on=practice.acceptance_depends_on,
        ).joint
        for rule in ("standard", "coupled", "deferred")
    ]
    print(f"{practice.name:36s}", *(f"{verdict:12s}" for verdict in verdicts))
