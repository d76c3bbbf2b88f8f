"""The results of all parts as one Markdown file, as far as they have come."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import page
from benchmarks.gpu.runner import Part, Row, read
from lightning_amp.quantities import format_bytes, format_seconds

FILE = "report.md"


def write_report(out: Path, parts: Sequence[Part], *, device: str, tiny: bool) -> None:
    """Write report.md from the parts' JSON files."""
    entries = {part: read(out / f"{part.file}.json").get(part.name) for part in parts}
    known = {part: entry for part, entry in entries.items() if entry is not None}
    lines = ["# Everything on one device", "", f"`--device {device}`{', tiny sizes' if tiny else ''}.", ""]
    lines += table(
        {
            "part": part.title,
            "status": entry["status"] if entry else "not begun",
            "s": entry.get("seconds", "") if entry else "",
            "error": entry["error"] if entry else "",
        }
        for part, entry in entries.items()
    )
    for part, entry in known.items():
        lines += ["", f"## {part.title}", "", *_section(entry)]
    (out / FILE).write_text("\n".join(lines) + "\n")


def _section(entry: Row) -> list[str]:
    lines = [f"{entry['status']}. {entry['error']}".strip().rstrip(".") + ".", ""]
    for name, value in entry["facts"].items():
        if isinstance(value, list):
            lines += [f"- {name}:", *(f"    - {one}" for one in value)]
        else:
            lines.append(f"- {name}: {shown(name, value)}")
    # rows of different kinds are different tables
    kinds = dict.fromkeys(tuple(row) for row in entry["rows"])
    for kind in kinds:
        lines += ["", *table(row for row in entry["rows"] if tuple(row) == kind)]
    return [*lines, *(["", *(f"- {note}" for note in entry["notes"])] if entry["notes"] else [])]


def table(rows: Iterable[Row]) -> list[str]:
    """Rows with the same keys as a table."""
    found = list(rows)
    if not found:
        return []
    names = list(found[0])
    cells = ([shown(name, row[name]).replace("|", "\\|").replace("\n", " ") for name in names] for row in found)
    return list(page.table([_heading(name) for name in names], cells))


def shown(name: str, value: Any) -> str:
    """A value as text, by the unit at the end of its name."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {shown(name, one)}" for key, one in value.items())
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float):
        return str(value)
    if name.endswith("_bytes"):
        return f"{value / 1e9:.4g} GB/s" if name.startswith(("per_second", "memory_rate")) else format_bytes(value)
    if name.endswith("seconds"):
        return format_seconds(value)
    if name.endswith("flops"):
        return f"{value / 1e12:.4g} TFLOP/s" if value >= 1e12 else f"{value / 1e9:.4g} GFLOP/s"
    if name.startswith("share_"):
        return f"{value:.0%}"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


def _heading(name: str) -> str:
    for unit in ("_bytes", "_seconds", "_flops"):
        name = name.removesuffix(unit)
    return name.replace("_", " ")
