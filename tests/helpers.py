"""Small things that several test modules need."""

import jax
import jax.numpy as jnp

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
