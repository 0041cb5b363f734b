"""Prequential replay: an estimator predicts every round before it learns from it, as it would while decoding."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from experiments.collect import DraftedRounds
from specav.estimators import AcceptanceEstimator
from specav.features import stack_features
from specav.labels import Labels


def prequential(estimator: AcceptanceEstimator, rounds: DraftedRounds) -> Float[np.ndarray, "R B K"]:
    """Returns the predictions that `estimator` made for every slot, each from earlier rounds alone."""
    features = stack_features(jax.tree.map(jnp.asarray, rounds.features), estimator.features)
    labels = Labels(*map(jnp.asarray, rounds.labels))
    return np.asarray(_scan(estimator.init, estimator.predict, estimator.step, features, labels))


@partial(jax.jit, static_argnums=(0, 1, 2))
def _scan(init, predict, step, features, labels):
    def one(state, now):
        features, labels = now
        probabilities = predict(state, features)
        state, _ = step(state, features, probabilities, labels)
        return state, probabilities

    return jax.lax.scan(one, init(), (features, labels))[1]
