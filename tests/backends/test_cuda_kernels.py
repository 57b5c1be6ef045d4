"""Every kernel compiles for every architecture, without a GPU, and keeps its registers."""

import re

import pytest

pytest.importorskip("cuda.core", reason="needs cuda-core, which pip install lct-torch[cuda] brings")

from lct.backends.cuda import jit, steps
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


def test_broken_kernel_names_source_and_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "source", lambda *_: "this is no kernel;")
    kernel, variant = jit.variants()[0]
    with pytest.raises(LctError, match=r"pooled_encode\.cu .* does not compile for sm_90"):
        jit.compile_kernel(kernel, variant, "sm_90")


def fields_of(struct: str, file: str) -> list[str]:
    """Names of the fields of a C structure, in order."""
    text = re.sub("//.*", "", (jit.KERNEL_DIR / file).read_text())
    body = text.split(f"struct {struct} {{")[1].split("};")[0]
    return re.findall(r"(\w+)(?:\[\d+\])?\s*[,;]", body)


def test_argument_structures_match_the_kernels() -> None:
    assert fields_of("Args", "common.cuh") == [name for name, *_ in jit.Args._fields_]
    assert fields_of("StepArgs", "sgd_update.cuh") == [name for name, *_ in steps.SgdArgs._fields_]


@pytest.mark.parametrize("book", bank(), ids=lambda b: b.name)
def test_tables_agree_with_the_book(book) -> None:
    tables = jit.codebook_tables(book)
    assert len(tables) == jit.TABLE_WORDS
    decode, encode = tables[:256], tables[256:768]
    for symbol in range(256):
        entry = int(encode[256 + symbol])
        length = int(book.lengths[symbol])
        if length:
            assert (entry & 31, entry >> 8 & 255) == (length, int(book.codes[symbol]))
            window = int(book.codes[symbol]) << (MAX_LENGTH - length)
            assert int(decode[window]) == symbol << 23 | length
        else:
            assert (entry >> 31, entry & 31) == (1, int(book.lengths[ESC]))
    assert int(encode[0]) == int(book.codes[ZERO]) << 8 | int(book.lengths[ZERO])
