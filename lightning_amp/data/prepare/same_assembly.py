"""Refuses a gene annotation of another assembly or species than the contacts.

Lengths are compared: genes are within the chromosomes of their assembly, and the last of many is near the end. If the
first chromosomes are as long as a human's or a mouse's, ids of genes are compared too.
"""

import re
from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from lightning_amp.data.files.chromosome_names import bare_name
from lightning_amp.errors import DataError

FEW, BEYOND = 3, 0.05
"""Least number and share of genes behind the end of their chromosome that are refused; fewer are left out."""
MANY, REACH = 100, 0.95
"""This many genes of a chromosome reach this share of its length; not on Y, half of which has no genes."""
LENGTHS = {"human": {"1": 249e6, "2": 243e6, "3": 199e6}, "mouse": {"1": 195e6, "2": 182e6, "3": 160e6}}
"""Lengths of the first chromosomes; assemblies of one species differ by less than 2 %."""
IDS = {"human": re.compile(r"ENSG\d"), "mouse": re.compile(r"ENSMUSG\d|[A-Z][a-z]")}
"""Start of most ids; symbols in capitals may be of any species."""
REMEDY = (
    "Give the annotation of the contacts' assembly. If the contacts have a part of each chromosome only, leave the"
    " genes of the other parts out of the annotation"
)


def check_same_assembly(genes: pd.DataFrame, bins: pd.DataFrame, *, annotation: str | Path) -> None:
    """Refuse genes that cannot be of the assembly of the bins.

    Args:
        genes: Positions of the annotation's genes, chromosomes in any spelling.
        bins: chrom, start, end of the bins that are kept.
        annotation: The file of `genes`, for messages.

    Raises:
        DataError: Many genes are behind the end of their chromosome, or all end long before it, or ids are of another
            species.
    """
    ends = {bare_name(chrom): int(end) for chrom, end in bins.groupby("chrom")["end"].max().items()}
    width = int((bins["end"] - bins["start"]).max())
    chroms = genes["chrom"].map(bare_name)
    end = chroms.map(ends)
    why = _beyond(genes, chroms, end + width, ends) or _short(genes, chroms, ends)
    species, named = _species_of(ends), _species_named(genes.index)
    if species and named and species != named:
        why = f"their names are a {named}'s, and the chromosomes are as long as a {species}'s"
    if why:
        raise DataError(
            f"{annotation}: its genes, such as {genes.index[:3].tolist()!r}, are of another assembly than the contacts:"
            f" {why}. {REMEDY}"
        )


def _beyond(genes: pd.DataFrame, chroms: pd.Series, last: pd.Series, ends: dict[str, int]) -> str:
    known, beyond = int(last.notna().sum()), genes[genes["start"] > last]
    if len(beyond) < max(FEW, BEYOND * known):
        return ""
    name, chrom = beyond.index[0], chroms[beyond.index[0]]
    return (
        f"{len(beyond):,} of {known:,} are behind the end of their chromosome, such as {name!r} at"
        f" {int(beyond['start'].iloc[0]):,} of chromosome {chrom}, whose bins end at {ends[chrom]:,}"
    )


def _short(genes: pd.DataFrame, chroms: pd.Series, ends: dict[str, int]) -> str:
    reach, size = genes.groupby(chroms)["end"].max(), chroms.value_counts()
    many = [name for name in reach.index if name in ends and name != "Y" and size[name] >= MANY]
    short = [name for name in many if reach[name] < REACH * ends[name]]
    if len(short) <= len(many) / 2:
        return ""
    return (
        f"on {len(short)} of {len(many)} chromosomes the last one is far from the end, such as at"
        f" {int(reach[short[0]]):,} of {ends[short[0]]:,} on chromosome {short[0]}"
    )


def _species_of(ends: dict[str, int]) -> str:
    """Return the species with first chromosomes of these lengths; "" if there is none."""
    for species, lengths in LENGTHS.items():
        there = lengths.keys() & ends.keys()
        if there and all(abs(ends[name] / lengths[name] - 1) < 0.02 for name in there):
            return species
    return ""


def _species_named(ids: Iterable[str]) -> str:
    """Return the species whose ids most genes have; "" if there is none."""
    known = list(ids)
    for species, pattern in IDS.items():
        if sum(pattern.match(name) is not None for name in known) > 0.8 * len(known):
            return species
    return ""
