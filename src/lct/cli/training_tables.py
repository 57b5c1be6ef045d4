"""Tables of ``lct bench train``."""

from __future__ import annotations

from typing import Any

from .output import print_line, print_table, table


def title_of(row: dict[str, Any]) -> str:
    """Which run a row is of."""
    keys = ("model", "configuration", "sequence", "micro_batch", "variant")
    return " ".join(str(row[key]) for key in keys)


def outcome_of(row: dict[str, Any]) -> str:
    """What came of it, in a few words."""
    if row.get("longest_sequence") is not None:
        return f"longest: {row['longest_sequence']}"
    if not row["completed"]:
        return str(row["error"])
    peak = row.get("peak_allocated_mib")
    return f"{row['step_ms_median']:.1f} ms" + (f", {peak:,.0f} MiB" if peak else "")


def print_result(result: dict[str, Any]) -> None:
    """All tables that the lists of ``result`` fill."""
    if result["rows"]:
        _print_rows(result["rows"])
    if result["pairs"]:
        _print_pairs(result["pairs"])
    if result["searches"]:
        _print_searches(result["searches"])
    for line in result["differences"]:
        print_line(f"differs: {line}")
    if any(row["identity"] for row in result["rows"]) and not result["differences"]:
        print_line("identical bits: losses, weights, optimizer state and validation loss")


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _over(row: dict[str, Any], base: dict[str, Any] | None, key: str) -> str:
    if base is None or row[key] is None or not base[key]:
        return ""
    return f"{row[key] / base[key]:.3f}"


def _print_rows(rows: list[dict[str, Any]]) -> None:
    columns = (
        *("model", "configuration", "variant", "tokens", "micro-batch"),
        *("peak MiB", "÷ dense", "reserved MiB"),
        *("step ms", "spread", "÷ dense", "GPU busy ms", "tokens/s", "losses"),
    )
    text = ("model", "configuration", "variant", "losses")
    shown = table("Training steps (medians; peaks over the timed steps)", columns, text=text)
    place = ("model", "configuration", "sequence", "micro_batch")
    previous = None
    for row in rows:
        group = tuple(row[key] for key in place)
        if previous not in (None, group):
            shown.add_section()
        previous = group
        base = next(
            (r for r in rows if r["variant"] == "dense" and tuple(r[k] for k in place) == group),
            None,
        )
        sha256 = row["loss_sha256"]
        losses = sha256[:8] if sha256 else outcome_of(row).partition(":")[0]
        shown.add_row(
            row["model"],
            row["configuration"],
            row["variant"] + (" (lossy)" if row["lossy"] else ""),
            str(row["sequence"]),
            str(row["micro_batch"]),
            _number(row["peak_allocated_mib"], ",.1f"),
            _over(row, base, "peak_allocated_mib"),
            _number(row["peak_reserved_mib"], ",.0f"),
            _number(row["step_ms_median"], ".2f"),
            _number(row["step_ms_iqr"], ".2f"),
            _over(row, base, "step_ms_median"),
            _number(row["gpu_busy_ms"], ".2f"),
            _number(row["tokens_per_s"], ",.0f"),
            losses,
        )
    print_table(shown)


def _print_pairs(rows: list[dict[str, Any]]) -> None:
    columns = (
        *("model", "configuration", "variant", "over", "tokens", "pairs"),
        *("step ratio", "spread", "GPU-busy ratio", "step ms", "base step ms", "losses"),
    )
    text = ("model", "configuration", "variant", "over", "losses")
    shown = table("Steps in turn: medians of the ratios of pairs", columns, text=text)
    for row in rows:
        if not row["completed"]:
            continue
        losses = "the same"
        if row["loss_sha256"] != row["base_loss_sha256"]:
            first = row.get("first_difference")  # older files lack it
            losses = "differ" if first is None else f"differ from step {first} on"
        shown.add_row(
            row["model"],
            row["configuration"],
            row["variant"],
            row["base"],
            str(row["sequence"]),
            str(row["pairs"]),
            f"{row['ratio_median']:.3f}",
            f"{row['ratio_iqr']:.3f}",
            _number(row["gpu_busy_ratio"], ".3f"),
            f"{row['step_ms_median']:.2f}",
            f"{row['base_step_ms_median']:.2f}",
            losses,
        )
    print_table(shown)


def _longest(row: dict[str, Any]) -> str:
    if row["longest_sequence"] is None:
        return "failed"
    return f"{'≥ ' if row['reached_limit'] else ''}{row['longest_sequence']}"


def _print_searches(rows: list[dict[str, Any]]) -> None:
    columns = (
        "model",
        "configuration",
        "variant",
        "longest",
        "peak MiB",
        "reserved MiB",
        "step ms",
    )
    text = ("model", "configuration", "variant")
    shown = table("Longest sequences that complete, tokens", columns, text=text)
    for row in rows:
        shown.add_row(
            row["model"],
            row["configuration"],
            row["variant"],
            _longest(row),
            _number(row["peak_allocated_mib"], ",.1f"),
            _number(row["peak_reserved_mib"], ",.0f"),
            _number(row["step_ms_median"], ".2f"),
        )
    print_table(shown)
