"""The demo: a byte-level GPT trained on real text without LCT and with it, compared bit by bit."""

from .data import Corpus, load_corpus
from .report import MAX_PEAK_RATIO, build_report
from .training import RECIPES, Recipe, Run, train

__all__ = [
    "MAX_PEAK_RATIO",
    "RECIPES",
    "Corpus",
    "Recipe",
    "Run",
    "build_report",
    "load_corpus",
    "train",
]
