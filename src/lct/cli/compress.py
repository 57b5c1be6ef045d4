"""``lct compress``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import DistributionOption, Force, JsonPath, OutputPath, PresetOption
from .output import check_outputs, human_bytes, print_line, progress_bar, write_summary


def compress(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="safetensors file to compress.")],
    output: OutputPath,
    preset: PresetOption = None,
    distribution: DistributionOption = None,
    force: Force = True,
    json_path: JsonPath = None,
) -> None:
    """Compress a safetensors file losslessly into a .lct file.

    Tensors of BF16, FP16 and FP32 are coded (FP32 that holds BF16 values
    shrinks most); every other dtype is stored as it is. One tensor is in
    memory at a time. Each is decoded again and compared bit for bit before it
    is written, and every byte of OUT is covered by a checksum. OUT appears
    whole or not at all. [bold]lct decompress[/bold] gives FILE back, byte for byte.

    [bold]Examples[/bold]
      lct compress model.safetensors -o model.lct
      lct compress model.safetensors -o model.lct --no-clobber --json summary.json

    [bold]Exit codes:[/bold] 0 done; 1 failed, and OUT is what it was; 2 wrong usage.
    """
    from ..checkpoint import compress_file

    check_outputs(json_path)
    with progress_bar("compress") as progress:
        summary = compress_file(
            file,
            output,
            preset=preset,
            distribution=distribution,
            overwrite=force,
            progress=progress,
        )
    print_line(
        f"{file} → {output}: {human_bytes(summary.dense_file_bytes)} → "
        f"{human_bytes(summary.compressed_file_bytes)}, ratio {summary.ratio:.4f} "
        f"({summary.num_coded} of {summary.num_tensors} tensors coded, the others as they are)"
    )
    if json_path is not None:
        write_summary(json_path, summary)
