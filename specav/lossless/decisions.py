"""Asks the real policy and estimator, in many worlds at once: JAX functions under vmap and jit, NumPy at both ends.

Calls are made in chunks of one size, so that each function compiles once per shape of a batch. What a policy reads is
not taken from its declaration but from its trace: an input that no operation touches cannot change a decision.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specav.estimators.base import AcceptanceEstimator
from specav.features import FEATURES, DraftFeatures, draft_features, stack_features
from specav.labels import verification_labels
from specav.policies import Policy, PolicyInputs
from specav.survival import survival_probabilities

CHUNK = 2048  # worlds per call


class StateCodec(NamedTuple):
    """A pytree of arrays as bytes and back. Typed keys are stored as their data.

    Attributes:
      example: a state, for its structure.
      shapes: shape and dtype of every leaf, without a leading axis.
    """

    example: Any
    shapes: tuple[jax.ShapeDtypeStruct, ...]

    def unpack(self, rows: np.ndarray) -> list[np.ndarray]:
        """uint8 [N, bytes] -> leaves [N, ...]."""
        leaves, start = [], 0
        for spec in self.shapes:
            end = start + int(np.prod(spec.shape)) * spec.dtype.itemsize
            leaf = np.ascontiguousarray(rows[:, start:end]).view(spec.dtype)
            leaves.append(leaf.reshape(len(rows), *spec.shape))
            start = end
        return leaves

    def pack(self, leaves: list[np.ndarray], count: int) -> np.ndarray:
        """Leaves [N, ...] -> uint8 [N, bytes]."""
        flat = [np.ascontiguousarray(leaf).reshape(count, -1).view(np.uint8) for leaf in leaves if leaf[0].size]
        return np.concatenate([np.zeros((count, 0), np.uint8), *flat], axis=1)

    def restore(self, leaves: list[Any]) -> Any:
        """Leaves of one state -> the pytree, inside a traced function."""
        models, tree = jax.tree.flatten(self.example)
        wrapped = [
            jax.random.wrap_key_data(leaf, impl=jax.random.key_impl(model)) if _is_key(model) else leaf
            for leaf, model in zip(leaves, models, strict=True)
        ]
        return jax.tree.unflatten(tree, wrapped)

    def flatten(self, state: Any, whose: str) -> list[Any]:
        """The pytree -> leaves of one state, inside a traced function.

        Raises:
          ValueError: it is not of the structure, shapes and dtypes of the initial state.
        """
        leaves = _plain_leaves(state)
        same = jax.tree.structure(state) == jax.tree.structure(self.example)
        if not same or [(x.shape, x.dtype) for x in leaves] != [(s.shape, s.dtype) for s in self.shapes]:
            raise ValueError(f"{whose}: expected a state like the initial one, {self.example}, got {state}")
        return leaves


def state_codec(state: Any) -> tuple[StateCodec, np.ndarray]:
    """A codec for states like this one, and its bytes uint8 [1, bytes]."""
    leaves = [np.asarray(leaf) for leaf in _plain_leaves(state)]
    codec = StateCodec(state, tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves))
    return codec, codec.pack([leaf[None] for leaf in leaves], 1)


def inputs_read(policy: Policy, num_requests: int, width: int) -> frozenset[str]:
    """The inputs that the traced decision touches: names of `FEATURES` and fields of `PolicyInputs`."""
    names = [*FEATURES, *(field for field in PolicyInputs._fields if field not in ("features", *_DEFAULTS))]
    rows, slots = (num_requests,), (num_requests, width)
    of_row = {"num_drafts", "active", "last_accepted", "last_tested"}
    dtypes = {"draft_tokens": jnp.int32, "num_drafts": jnp.int32, "active": jnp.bool_, "num_drafting": jnp.int32}
    dtypes |= {"last_accepted": jnp.int32, "last_tested": jnp.int32}
    values = {
        name: jnp.zeros(
            rows if name in of_row else () if name == "num_drafting" else slots, dtypes.get(name, jnp.float32)
        )
        for name in names
    }
    jaxpr = jax.make_jaxpr(lambda given: policy.decide(policy.init(), _policy_inputs(given)))(values).jaxpr
    touched = {id(variable) for equation in jaxpr.eqns for variable in equation.invars}
    touched |= {id(variable) for variable in jaxpr.outvars}
    return frozenset(
        name for name, variable in zip(sorted(names), jaxpr.invars, strict=True) if id(variable) in touched
    )


@functools.lru_cache(maxsize=64)
def decisions(policy: Policy, estimator: AcceptanceEstimator | None, names: tuple[str, ...]) -> Callable[..., Any]:
    """A function that predicts and decides in many worlds.

    Args:
      policy: what decides.
      estimator: what predicts; None: sigmoid(logit_q_max), as in `specav.decode`, or nothing without that feature.
      names: features in the order of the last axis.

    Returns:
      (policy state leaves, estimator state leaves, dict of arrays [N, ...]) ->
      [num_verified int32 [N, R], acceptance float32 [N, R, K], *new policy state leaves].
    """
    codec = state_codec(policy.init())[0]
    predict = _predictor(estimator, names)

    def one(policy_leaves, estimator_leaves, given):
        features = _named(given["features"], names)
        predicted = predict(estimator_leaves, features, given["depth"])
        acceptance = jnp.where(given["is_new"], predicted, given["acceptance"])
        inputs = {
            "acceptance": acceptance,
            "survival": survival_probabilities(acceptance, given["num_drafts"]),
            **{name: given[name] for name in _GIVEN},
            **features,
        }
        num_verified, state = policy.decide(codec.restore(policy_leaves), _policy_inputs(inputs))
        return [num_verified, acceptance, *codec.flatten(state, f"decide of policy {policy.name!r}")]

    return _in_chunks(jax.jit(jax.vmap(one)))


@functools.lru_cache(maxsize=64)
def lessons(estimator: AcceptanceEstimator, names: tuple[str, ...]) -> Callable[..., Any]:
    """A function that teaches the estimator a round, in many worlds.

    Returns:
      (estimator state leaves, dict of arrays [N, ...]) -> new estimator state leaves.
    """
    codec = state_codec(estimator.init())[0]

    def one(leaves, given):
        features = stack_features(DraftFeatures(**_named(given["features"], names)), estimator.features)
        acceptance = given["acceptance"]
        labels = verification_labels(given["num_accepted"], given["num_tested"], acceptance.shape[1])
        state, _ = estimator.step(codec.restore(leaves), features, acceptance, labels, depth=given["depth"])
        return codec.flatten(state, "step of the estimator")

    return _in_chunks(jax.jit(jax.vmap(one)))


@functools.lru_cache(maxsize=64)
def feature_tables(names: tuple[str, ...]) -> Callable[..., Any]:
    """A function from logits float32 [N, V] to features float32 [N, V, F] of every token that may be drawn."""
    prefix = tuple(name for name in names if FEATURES[name].depends_on == "prefix")
    draw = tuple(name for name in names if name not in prefix)

    def tables(logits):
        size, vocabulary = logits.shape
        found = {}
        if prefix:
            per_law = draft_features(logits, names=prefix)
            found |= {n: jnp.broadcast_to(getattr(per_law, n)[:, None], (size, vocabulary)) for n in prefix}
        if draw:
            each = jnp.broadcast_to(logits[:, None, :], (size, vocabulary, vocabulary))
            tokens = jnp.broadcast_to(jnp.arange(vocabulary, dtype=jnp.int32)[None, :], (size, vocabulary))
            per_token = draft_features(each, tokens, names=draw)
            found |= {n: getattr(per_token, n) for n in draw}
        return [jnp.stack([found[name] for name in names], axis=-1)]

    return _in_chunks(jax.jit(tables))


_DEFAULTS = ("num_base_tokens", "num_sampling")  # left to their defaults, as in `specav.decode`
_GIVEN = ("draft_tokens", "num_drafts", "active", "num_drafting", "last_accepted", "last_tested")


def _policy_inputs(given):
    """`PolicyInputs` from a dict in which features stand under their own names."""
    features = {name: value for name, value in given.items() if name in FEATURES}
    rest = {name: value for name, value in given.items() if name not in FEATURES}
    return PolicyInputs(features=DraftFeatures(**features), **rest)


def _predictor(estimator, names):
    """(estimator state leaves, features by name, depth) -> predictions [R, K]."""
    if estimator is not None:
        codec = state_codec(estimator.init())[0]

        def predict(leaves, features, depth):
            stacked = stack_features(DraftFeatures(**features), estimator.features)
            return estimator.predict(codec.restore(leaves), stacked, depth=depth)

        return predict
    if "logit_q_max" in names:
        return lambda leaves, features, depth: jax.nn.sigmoid(features["logit_q_max"])
    return lambda leaves, features, depth: jnp.zeros(depth.shape, jnp.float32)


def _named(features, names):
    """Features [..., F] by their names."""
    return {name: features[..., i] for i, name in enumerate(names)}


def _in_chunks(function):
    """`function` of pytrees of arrays [N, ...], called on chunks of CHUNK rows (the last one is filled up)."""

    def call(*arguments):
        leaves, tree = jax.tree.flatten(arguments)
        count = len(leaves[0])
        results = []
        for start in range(0, count, CHUNK):
            part = [leaf[start : start + CHUNK] for leaf in leaves]
            missing = CHUNK - len(part[0])
            if missing:
                part = [np.concatenate([leaf, np.repeat(leaf[:1], missing, axis=0)]) for leaf in part]
            results.append(function(*jax.tree.unflatten(tree, part)))  # not waited for
        columns = [[np.asarray(piece) for piece in pieces] for pieces in zip(*results, strict=True)]
        return [np.concatenate(column)[:count] for column in columns]

    return call


def _plain_leaves(state):
    """The leaves of a state as arrays, typed keys as their data."""
    leaves = [leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf) for leaf in jax.tree.leaves(state)]
    return [jax.random.key_data(leaf) if _is_key(leaf) else leaf for leaf in leaves]


def _is_key(leaf):
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
