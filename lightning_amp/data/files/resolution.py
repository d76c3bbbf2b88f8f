"""Convert bin widths to names and back, and match names of chromosomes with and without 'chr'."""

import re
from collections.abc import Iterable, Sequence

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


NUCLEAR = re.compile(r"\d{1,2}[A-Z]?|[IVX]{1,5}|[XYWZ]|NC_\d+\.\d+")
"""Bare names of chromosomes: numbers, with arms, Roman ones, sex chromosomes, and those of RefSeq."""


def bare_name(chrom: str) -> str:
    """Return the name without "chr", the mitochondrial one as "M", so that two spellings compare equal."""
    name = chrom[3:] if chrom.lower().startswith("chr") else chrom
    return "M" if name == "MT" else name


def spell_as(reference: Iterable[str], names: Iterable[str]) -> dict[str, str]:
    """Return the reference's spelling of each name that is in the reference."""
    spelling = {bare_name(chrom): chrom for chrom in reference}
    return {name: spelling[bare_name(name)] for name in names if bare_name(name) in spelling}


def choose_chromosomes(chosen: Sequence[str] | None, present: Sequence[str], *, path: object) -> list[str]:
    """Return the chromosomes to keep, in the spelling and order of those present in the file.

    Chosen names may be written with or without "chr"; None keeps all but scaffolds and the mitochondrial one, or all if
    no name is a known chromosome's.

    Raises:
        DataError: A name is not in the file, or none is given.
    """
    if chosen is None:
        return [chrom for chrom in present if NUCLEAR.fullmatch(bare_name(chrom))] or list(present)
    spelled = spell_as(present, chosen)
    unknown = [name for name in chosen if name not in spelled]
    if unknown or not chosen:
        raise DataError(
            f"{path}: chromosomes={list(chosen)!r} was given, of which {unknown!r} are not in the file; it "
            f"has {list(present)[:30]!r}"
        )
    return [chrom for chrom in present if chrom in spelled.values()]
