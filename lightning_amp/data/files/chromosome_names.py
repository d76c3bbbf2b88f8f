"""Matches chromosome names written with and without "chr"."""

import re
from collections.abc import Iterable, Sequence

from lightning_amp.errors import DataError

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
