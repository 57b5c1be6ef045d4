"""``lct inspect``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from .options import JsonPath, PlotPath
from .output import check_outputs, command_line, human_bytes, print_table, progress_bar, table
from .plots import check_suffix

COLUMNS = (
    "tensor",
    "dtype",
    "shape",
    "entropy",
    "Huffman",
    "best book",
    "bits",
    "predicted",
    "real",
)


@dataclass(frozen=True)
class Row:
    """A tensor of the file; the analysis is None where LCT does not code the dtype."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    dense_bytes: int
    stored_bytes: int
    analysis: Any

    @property
    def ratio(self) -> float:
        return self.dense_bytes / self.stored_bytes if self.stored_bytes else 1.0


def inspect(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="safetensors file, .lct file, or .npy array (uint16: bit patterns of BF16; "
            "float16; float32).",
        ),
    ],
    json_path: JsonPath = None,
    plot_path: PlotPath = None,
) -> None:
    """Show what each tensor of a file costs: entropy of the exponents, best codebook, ratios.

    [bold]entropy[/bold] and [bold]Huffman[/bold] (best code of at most 8 bits, made for this
    tensor) are bits per exponent of the whole tensor. [bold]best book[/bold] is LCT's
    precomputed book that fits best, [bold]bits[/bold] what it costs with a shift per 256
    values: less than the entropy where the scale changes from row to row.
    [bold]predicted[/bold] adds headers and the average slack of streams; [bold]real[/bold] is
    dense bytes over all bytes that [bold]lct compress[/bold] stores (in a .lct file: has
    stored).

    [bold]Examples[/bold]
      lct inspect model.safetensors
      lct inspect model.lct --json model.json --plot model.png

    [bold]Exit codes:[/bold] 0 done, 1 failed, 2 wrong usage.
    """
    from ..bench.results import describe_run, write_json

    check_outputs(json_path, plot_path)
    check_suffix(plot_path)
    rows = _rows(file)
    dense, stored = sum(row.dense_bytes for row in rows), sum(row.stored_bytes for row in rows)
    ratio = dense / stored if stored else 1.0
    _print(file, rows, dense, stored, ratio)
    if json_path is not None:
        tensors = [_fields(row) for row in rows]
        totals = {
            "num_tensors": len(rows),
            "dense_bytes": dense,
            "stored_bytes": stored,
            "ratio": ratio,
        }
        head = describe_run(command_line(), "cpu")
        write_json(json_path, {**head, "file": str(file), "tensors": tensors, "totals": totals})
    if plot_path is not None:
        from .plots import plot_inspection

        named = [(row.name, row.ratio, row.dense_bytes) for row in rows]
        plot_inspection(plot_path, str(file), named, ratio)


def _rows(file: Path) -> list[Row]:
    from ..analysis import analyze_tensor
    from ..checkpoint.convert import stored_size
    from ..checkpoint.sources import read_tensors

    rows = []
    done, total = 0, file.stat().st_size
    with progress_bar("inspect") as progress:
        for source in read_tensors(file):
            progress(source.name, min(done, total), total)
            analysis, stored = None, source.dense_bytes
            if source.load is not None and source.dense_bytes:
                tensor = source.load()
                analysis = analyze_tensor(tensor)
                if source.stored_bytes is None:
                    stored = stored_size(tensor)
            if source.stored_bytes is not None:
                stored = source.stored_bytes
            rows.append(
                Row(source.name, source.dtype, source.shape, source.dense_bytes, stored, analysis)
            )
            done += source.dense_bytes if source.stored_bytes is None else source.stored_bytes
    return rows


def _fields(row: Row) -> dict[str, Any]:
    analysis = asdict(row.analysis) if row.analysis is not None else {}
    return {
        "name": row.name,
        "dtype": row.dtype,
        "shape": list(row.shape),
        "dense_bytes": row.dense_bytes,
        "stored_bytes": row.stored_bytes,
        "ratio": row.ratio,
        **analysis,
    }


def _print(file: Path, rows: list[Row], dense: int, stored: int, ratio: float) -> None:
    from rich.text import Text

    words = ("tensor", "dtype", "shape", "best book")
    shown = table(f"{file}: bits per exponent and ratios", COLUMNS, text=words)
    for row in rows:
        a = row.analysis
        figures = (
            (
                f"{a.entropy_bits:.3f}",
                f"{a.huffman_bits:.3f}",
                a.book,
                f"{a.book_bits:.3f}",
                f"{a.predicted_ratio:.4f}",
            )
            if a is not None
            else ("–", "–", "stored as it is", "–", "–")
        )
        shape = "×".join(map(str, row.shape)) or "scalar"
        shown.add_row(Text(row.name), row.dtype, shape, *figures, f"{row.ratio:.4f}")
    shown.add_section()
    shown.add_row(
        f"total of {len(rows)}",
        "",
        "",
        "",
        "",
        f"{human_bytes(dense)} → {human_bytes(stored)}",
        "",
        "",
        f"{ratio:.4f}",
    )
    print_table(shown)
