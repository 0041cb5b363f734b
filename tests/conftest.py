"""Shared set-up: four host devices, strict promotion, and a switch for the run-time shape checker."""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"

import hypothesis
import jax
import jaxtyping
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Compilation makes the first example slow, and CI machines are shared: no deadlines. Derandomised, so that a
# failure on one machine is a failure on every machine.
hypothesis.settings.register_profile(
    "specav",
    deadline=None,
    max_examples=40,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)
hypothesis.settings.load_profile("specav")


@pytest.fixture
def own_checks():
    """Switches the jaxtyping checker off, so that the library's own checks speak."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)
