"""Torch's optimizers with compressed state: same arguments, state keys and bits."""

from .adam import Adam, AdamW
from .in_backward import StepInBackward, step_in_backward
from .muon import Muon
from .sgd import SGD

__all__ = ["SGD", "Adam", "AdamW", "Muon", "StepInBackward", "step_in_backward"]
