"""``lct decompress``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import Force, JsonPath, OutputPath
from .output import check_outputs, human_bytes, print_line, progress_bar, write_summary


def decompress(
    file: Annotated[Path, typer.Argument(metavar="FILE", help=".lct file to decompress.")],
    output: OutputPath,
    force: Force = True,
    json_path: JsonPath = None,
) -> None:
    """Decompress a .lct file into the safetensors file that it was made from, byte for byte.

    Checksums of the compressed and of the decoded bytes are compared on the
    way. A file that is truncated, damaged or of another kind gives one error
    that names what is wrong, and no output.

    [bold]Examples[/bold]
      lct decompress model.lct -o model.safetensors
      lct decompress model.lct -o copy.safetensors && cmp copy.safetensors model.safetensors

    [bold]Exit codes:[/bold] 0 done; 1 failed, and OUT is what it was; 2 wrong usage.
    """
    from ..checkpoint import decompress_file

    check_outputs(json_path)
    with progress_bar("decompress") as progress:
        summary = decompress_file(file, output, overwrite=force, progress=progress)
    print_line(
        f"{file} → {output}: {human_bytes(summary.compressed_file_bytes)} → "
        f"{human_bytes(summary.dense_file_bytes)}, {summary.num_tensors} tensors, checksums match"
    )
    if json_path is not None:
        write_summary(json_path, summary)
