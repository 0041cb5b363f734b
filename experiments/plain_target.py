"""specav on a target that is a plain function: letter 4-grams of Python's help text, drafted by trigrams.

    python -m experiments.plain_target

No neural network and no flax: a model is any pure function `(state, tokens, positions, num_tokens) -> (logits, state)`
(`specav.drafting`). Here it looks up a table; the letters before the one it is fed are its "KV cache".

Requests differ in temperature, hence in how well drafts fare, and in length: the batch thins out, and verifying
becomes cheaper. Every row of the printed table drafts 6 letters per round and differs in what it verifies: a fixed
number, or what the trimmer chooses with an estimator that learns while it decodes. Tokens are what was really emitted;
step times are assumed, see `COSTS`.
"""

import argparse
import re
from pydoc_data import topics
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specav import estimators, policies
from specav.costs import cost_table, draft_cost, verify_cost
from specav.decode import Decoder, DecodeState, decoder
from specav.drafting import Model, autoregressive_drafter
from specav.sampling import SamplingParams

ALPHABET = " abcdefghijklmnopqrstuvwxyz"
NUM_DRAFTS = 6
FEATURES = ("logit_q_max", "entropy")
TEMPERATURES = (0.3, 1.0)  # in turn
# In units of one target call of up to 16 tokens. Larger calls take longer, in steps, as captured graphs do.
COSTS = cost_table(
    [16, 32, 48, 64, 80, 96, 112], [1.0, 1.15, 1.4, 1.75, 2.1, 2.45, 2.8], draft_sizes=[16], draft_times=[0.2]
)


class Report(NamedTuple):
    """What one policy did.

    Attributes:
      name: of the policy.
      tokens_per_round: emitted per request and round.
      verified_per_round: drafts fed to the target per request and round.
      tokens_per_time: emitted per unit of assumed time, over the whole batch.
      text: the last request's prompt and output.
    """

    name: str
    tokens_per_round: float
    verified_per_round: float
    tokens_per_time: float
    text: str


def main(arguments: list[str] | None = None) -> list[Report]:
    """Entry point; prints a table and returns its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1500, help="new letters of the longest request")
    parser.add_argument("--batch", type=int, default=16, help="requests")
    parser.add_argument("--fixed", type=int, nargs="*", default=[1, 2, 3, 4, 6], help="lengths to compare with")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)

    tables = count_ngrams(read_text(), 4)
    candidates = [policies.fixed(k) for k in options.fixed] + [policies.trimmer(COSTS)]
    print(f"{'policy':12}{'tokens/round':>14}{'verified/round':>16}{'tokens/time':>13}")
    rows = []
    for policy in candidates:
        row = decode(policy, tables[-1], tables[-2], options.tokens, options.batch, options.seed)
        print(f"{row.name:12}{row.tokens_per_round:14.2f}{row.verified_per_round:16.2f}{row.tokens_per_time:13.2f}")
        rows.append(row)
    print(f"\nThe last request under {rows[-1].name}: {rows[-1].text[:200]!r}")
    return rows


def read_text() -> Int[np.ndarray, " N"]:
    """The help text as indices into `ALPHABET`: lower-case letters, with one blank for everything between."""
    text = " ".join(topics.topics[name] for name in sorted(topics.topics)).lower()
    codes = np.frombuffer(re.sub("[^a-z]+", " ", text).encode(), np.uint8)
    return np.where(codes == ord(" "), 0, codes - ord("a") + 1).astype(np.int32)


def count_ngrams(text: Int[np.ndarray, " N"], order: int) -> list[Float[Array, "..."]]:
    """Log-laws of the next letter given 0, 1 .. order - 1 letters, each leaning a little on the one before it."""
    size = len(ALPHABET)
    law, tables = np.full(size, 1.0 / size), []
    for context in range(order):
        counts = np.zeros((size,) * (context + 1))
        np.add.at(counts, tuple(text[i : len(text) - context + i] for i in range(context + 1)), 1)
        law = (counts + 2 * law) / (counts.sum(axis=-1, keepdims=True) + 2)
        tables.append(jnp.asarray(np.log(law), jnp.float32))
    return tables


def table_model(table: Float[Array, "..."]) -> Model:
    """A model whose law is a table [V, .., V] of log-probabilities given the last letters.

    Its state is the text so far, int32 [B, L], indexed by absolute position like a KV cache: stale entries beyond the
    committed text are overwritten before they are read. Before the text stand blanks.
    """

    def model(state, tokens, positions, num_tokens):
        columns = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        where = positions[:, None] + columns
        # Rows that are not real are written nowhere.
        write = jnp.where(columns < num_tokens[:, None], where, state.shape[1])
        state = jax.vmap(lambda row, at, new: row.at[at].set(new, mode="drop"))(state, write, tokens)
        context = []
        for back in range(table.ndim - 2, -1, -1):
            letters = jnp.take_along_axis(state, jnp.clip(where - back, 0, state.shape[1] - 1), axis=1)
            context.append(jnp.where(where >= back, letters, 0))
        return table[tuple(context)], state

    return model


def decode(
    policy: policies.Policy,
    target_table: Float[Array, "..."],
    draft_table: Float[Array, "..."],
    num_tokens: int,
    batch: int,
    seed: int,
) -> Report:
    """Decodes one batch under a policy and sums it up."""
    loop = decoder(
        table_model(target_table),
        autoregressive_drafter(table_model(draft_table), NUM_DRAFTS),
        num_draft_tokens=NUM_DRAFTS,
        max_new_tokens=num_tokens,
        policy=policy,
        estimator=estimators.online_logistic(NUM_DRAFTS, FEATURES),
        sampling=SamplingParams(jnp.resize(jnp.asarray(TEMPERATURES), (batch,))),
    )
    prompt = [ALPHABET.index(letter) for letter in "the "]

    @jax.jit
    def run(key):
        prompts = jnp.tile(jnp.asarray(prompt, jnp.int32), (batch, 1))
        lengths = jnp.full((batch,), len(prompt), jnp.int32)
        cache = jnp.zeros((batch, len(prompt) + num_tokens), jnp.int32)
        limits = jnp.arange(1, batch + 1, dtype=jnp.int32) * num_tokens // batch
        state = loop.init(jax.random.split(key, batch), prompts, lengths, cache, cache, token_limits=limits)
        return decode_and_price(loop, state)

    state, time = run(jax.random.key(seed))
    counts = state.statistics
    emitted, rounds = int(counts.emitted.sum()), int(counts.rounds.sum())
    return Report(
        policy.name,
        tokens_per_round=emitted / rounds,
        verified_per_round=int(counts.verified.sum()) / rounds,
        tokens_per_time=emitted / float(time),
        text="".join(ALPHABET[i] for i in np.asarray(state.tokens[-1]) if i >= 0),
    )


def decode_and_price(loop: Decoder, state: DecodeState) -> tuple[DecodeState, Float[Array, ""]]:
    """`loop.run`, adding up what each round's drafting and target call would take."""

    def body(carry):
        state, time = carry
        state, info = loop.step(state)
        num_active = jnp.sum(info.active, dtype=jnp.int32)
        num_tokens = num_active + jnp.sum(info.num_verified, dtype=jnp.int32)
        return state, time + draft_cost(COSTS, num_active) + verify_cost(COSTS, num_tokens)

    return jax.lax.while_loop(lambda carry: ~jnp.all(carry[0].finished), body, (state, jnp.zeros(())))


if __name__ == "__main__":
    main()
