"""Every kernel compiles for every architecture, without a GPU, and keeps its registers."""

import itertools
import re

import numpy as np
import pytest

pytest.importorskip("cuda.core", reason="needs cuda-core, which pip install lct-torch[cuda] brings")

from lct.backends.cuda import codec, jit, steps
from lct.codebook import ESC, MAX_LENGTH, ZERO, bank
from lct.errors import LctError


@pytest.mark.timeout(600)
@pytest.mark.parametrize("arch", jit.ARCHITECTURES)
def test_every_kernel_compiles_without_spills(arch: str) -> None:
    for kernel, variant in jit.variants():
        code, used = jit.compile_kernel(kernel, variant, arch)
        name = f"{kernel.entry} {variant.preset.name} {variant.dtype.name} {arch}"
        name = f"{name} {' '.join(sorted(variant.options))}".rstrip()
        assert code[:4] == b"\x7fELF", name
        assert (used.spill_bytes, used.stack_bytes) == (0, 0), f"{name}: {used}"
        if kernel.entry.endswith("_step"):
            assert 0 < used.shared_bytes <= steps.DECLARED_BYTES, f"{name}: {used}"


def test_broken_kernel_names_source_and_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "source", lambda *_: "this is no kernel;")
    kernel, variant = jit.variants()[0]
    with pytest.raises(LctError, match=r"pooled_encode\.cu .* does not compile for sm_90"):
        jit.compile_kernel(kernel, variant, "sm_90")


def fields_of(struct: str, file: str) -> list[str]:
    """Names of the fields of a C structure, in order."""
    text = re.sub("//.*", "", (jit.KERNEL_DIR / file).read_text())
    body = text.split(f"struct {struct} {{")[1].split("};")[0]
    return re.findall(r"(\w+)(?:\[[\w +]+\])?\s*[,;]", body)


def test_argument_structures_match_the_kernels() -> None:
    assert fields_of("Args", "common.cuh") == [name for name, *_ in jit.Args._fields_]
    for file, args in (
        ("sgd_update.cuh", steps.SgdArgs),
        ("adam_update.cuh", steps.AdamArgs),
        ("muon_update.cuh", steps.MuonArgs),
    ):
        assert fields_of("StepArgs", file) == [name for name, *_ in args._fields_]
    names = [name for name, *_ in steps._list_type(steps.SgdArgs)._fields_]
    assert fields_of("StepList", "step.cuh") == names
    names = [name for name, *_ in codec.TensorList._fields_]
    assert fields_of("TensorList", "tensor_list.cuh") == names


@pytest.mark.parametrize("book", bank(), ids=lambda b: b.name)
def test_tables_agree_with_the_book(book) -> None:
    tables = jit.codebook_tables(book)
    sizes = (
        jit.SINGLES_WORDS,
        jit.PAIRS_WORDS,
        jit.ENCODE_WORDS,
        jit.ENCODE_PAIRS_WORDS,
        jit.COST_WORDS,
        4,
    )
    assert len(tables) == jit.TABLE_WORDS == sum(sizes)
    singles, pairs, encode, encode_pairs, cost, window = np.split(tables, np.cumsum(sizes)[:-1])
    assert (cost[: ZERO + 1] == book.cost_bits).all()
    for symbol in range(ZERO + 1):
        entry = int(encode[symbol])
        length = int(book.lengths[symbol])
        if not length:
            assert (entry >> 31, entry & 31) == (1, int(book.lengths[ESC]))
            continue
        assert (entry & 31, entry >> 8) == (length, int(book.codes[symbol]))
        first = int(book.codes[symbol]) << (MAX_LENGTH - length)
        delta = (symbol - 128) % 256 << 23 if symbol < ZERO else 0x4000
        assert int(singles[first]) == delta | length
    # All pairs of 12 bits against two look-ups of one symbol.
    for bits in range(jit.PAIRS_WORDS):
        one = int(singles[bits >> 4])
        two = int(singles[(bits << (one & 31) & 0xFFF) >> 4])
        length = (one & 31) + (two & 31)
        slow = length > 12 or (one | two) & 0x8000
        entry = (two >> 23 << 23) | (one >> 23 << 7) | length
        entry |= (0x8000 if one & 0x4000 else 0) | (0x80000000 if two & 0x4000 else 0)
        assert int(pairs[bits]) == (0x10000 if slow else entry), bits
    start = int(window[0])
    for high, low in itertools.product(range(16), repeat=2):
        a, b = int(encode[start + low]), int(encode[start + high])
        length = (a & 31) + (b & 31)
        code = (a >> 8 & 255) << (b & 31) | (b >> 8 & 255)
        slow = (a | b) >> 31
        assert int(encode_pairs[low + jit.PAIR_STRIDE * high]) == (
            0x20 if slow else code << 16 | length
        )
