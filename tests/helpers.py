"""Small things that several test modules need."""

import jax
import jax.numpy as jnp

from specav.policies import Policy

FORBIDDEN = ("callback", "infeed", "outfeed", "device_put", "debug_print")


def primitives(jaxpr):
    """Names of all primitives of a jaxpr, inner ones included."""
    names = set()
    for equation in jaxpr.eqns:
        names.add(equation.primitive.name)
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    names |= primitives(inner)
    return names


def assert_stays_on_device(function, *args):
    """The traced function contains no callback and no host transfer."""
    names = primitives(jax.make_jaxpr(function)(*args).jaxpr)
    assert not [name for name in names if any(word in name for word in FORBIDDEN)], names


def count_traces(function):
    """`function` under jit, and a list that grows by one with every trace."""
    traces = []

    def counted(*args):
        traces.append(1)
        return function(*args)

    return jax.jit(counted), traces


def bigram_model(table):
    """A model of the decoding loop's contract whose law depends on the last token only; table float [V, V] logits."""
    table = jnp.asarray(table)

    def model(state, tokens, positions, num_tokens):
        del positions, num_tokens
        return table[tokens], state

    return model


def choice(options):
    """A policy that follows one of `options`: its state is (index int32 [], their states), the index to be set.

    One compiled loop can then run them all. It declares to read what any of them reads.
    """
    options = list(options)

    def decide(state, inputs):
        index, states = state

        def branch(i):
            def follow(states):
                num_verified, after = options[i].decide(states[i], inputs)
                return num_verified, (*states[:i], after, *states[i + 1 :])

            return follow

        num_verified, states = jax.lax.switch(index, [branch(i) for i in range(len(options))], states)
        return num_verified, (index, states)

    return Policy(
        init=lambda: (jnp.zeros((), jnp.int32), tuple(option.init() for option in options)),
        decide=decide,
        name="choice",
        window="block",
        reads=tuple(dict.fromkeys(read for option in options for read in option.reads)),
        couples="live",
    )
