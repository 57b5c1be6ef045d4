"""Torch's optimizers with compressed state: same arguments, state keys and bits."""

from .sgd import SGD

__all__ = ["SGD"]
