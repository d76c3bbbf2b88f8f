"""Converts bin widths in base pairs to names ("500kb", "1mb") and back."""

import re

from lightning_amp.errors import DataError

PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*(bp|kb|mb)?", re.IGNORECASE)
UNITS = {"bp": 1, "kb": 1_000, "mb": 1_000_000}


def parse_resolution(resolution: int | str) -> int:
    """Return the bin width in base pairs of a number or a text such as "500kb", "1mb", "2500".

    Raises:
        DataError: The text is not a resolution, or the width is not a positive whole number.
    """
    width = _width(str(resolution).strip())
    if width < 1 or width != int(width):
        raise DataError(
            f"resolution {resolution!r} is not a bin width; write base pairs (500000) or a text like "
            "'500kb', '1mb'"
        )
    return int(width)


def format_resolution(width: int) -> str:
    """Return the name of a bin width given in base pairs: 1000000 is "1000kb", as in HiGLUE's file names."""
    return f"{width / 1000:.10g}kb"


def strip_resolution(cell: str, *, resolution: int) -> str:
    """Return a cell's name without a ".cool" ending and without a suffix that names this resolution, in base pairs.

    Only a suffix equal to the resolution goes ("a.500kb" at 500000), so other dots in names are safe.
    """
    name = cell.removesuffix(".cool")
    stem, _, suffix = name.rpartition(".")
    if stem and _width(suffix) == resolution:
        return stem
    return name


def _width(text: str) -> float:
    """Base pairs; 0 for a text that is no resolution."""
    match = PATTERN.fullmatch(text)
    return float(match[1]) * UNITS[(match[2] or "bp").lower()] if match else 0.0
