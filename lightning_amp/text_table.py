"""Format a table as text of at most 80 columns."""

import re
from collections.abc import Sequence
from textwrap import TextWrapper

WIDTH = 80
NARROWEST = 12
"""Least width of a wrapped column."""


class _Wrapper(TextWrapper):
    """Wrap names of modules after a dot."""

    wordsep_simple_re = re.compile(r"(\s+)|(?<=\w\w\.)(?=[a-zA-Z_])")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Align columns and wrap the last one; the caller formats numbers so that they align."""
    widths = [max(len(str(row[i])) for row in [header, *rows]) for i in range(len(header) - 1)]
    left = sum(widths) + 2 * len(widths)
    last = max(len(str(row[-1])) for row in [header, *rows])
    lines = []
    for row in [header, ["-" * w for w in widths] + ["-" * max(4, min(last, WIDTH - left))], *rows]:
        first = "  ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=False))
        parts = _Wrapper(max(NARROWEST, WIDTH - left), break_on_hyphens=False).wrap(str(row[-1])) or [""]
        lines += [f"{first}  {parts[0]}".rstrip(), *(" " * left + part for part in parts[1:])]
    return "\n".join(lines)
