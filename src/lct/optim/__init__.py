"""Torch's optimizers with compressed state: same arguments, state keys and bits."""

from .adam import Adam, AdamW
from .sgd import SGD

__all__ = ["SGD", "Adam", "AdamW"]
