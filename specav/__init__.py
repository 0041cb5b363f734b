"""specav: calibrated acceptance estimators and lossless adaptive verification for speculative decoding."""

from specav._version import __version__

__all__ = ["__version__"]
