"""Policies of constant length, which read nothing."""

from specav._checks import static_int
from specav.policies.base import Policy, by_number

_EVERYTHING = 2**31 - 1


def everything() -> Policy:
    """Verifies all drafts: n = K_r, plain speculative decoding (Leviathan et al., 2023). Reads nothing."""
    return by_number("everything", _EVERYTHING)


def nothing() -> Policy:
    """Verifies no draft: n = 0. The coupled and deferred rules still test one draft, on the free row. Reads nothing."""
    return by_number("nothing", 0)


def fixed(num_verified: int) -> Policy:
    """Verifies a constant number: n = min(num_verified, K_r), the gamma of Leviathan et al. (2023). Reads nothing.

    Raises:
      TypeError, ValueError: `num_verified` is not an int >= 0.
    """
    num_verified = static_int("num_verified", num_verified, 0)
    return by_number(f"fixed({num_verified})", num_verified)
