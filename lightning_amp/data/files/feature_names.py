"""Parses names of Hi-C features: "chr1:0-500000" is a bin, "chr1:0-500000-3" the pair with the third next."""

import re
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from lightning_amp.errors import DataError

BIN = re.compile(rb".+:\d+-\d+")


def parse_names(blocks: Iterable[list[bytes]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the stratum and the anchor code of every name, anchors numbered as stratum 0 lists them.

    Args:
        blocks: The names, in blocks, so that never all of them are in memory.

    Returns:
        Two arrays of shape [feature].

    Raises:
        DataError: A name is no feature name, or its bin is not in stratum 0, or a bin comes twice.
    """
    anchors: dict[bytes, int] = {}
    strata, codes = [], []
    for block in blocks:
        for name in block:
            # A name that extends a known bin is looked up below; only bins themselves need the pattern.
            if name.rpartition(b"-")[0] not in anchors:
                _add_bin(name, anchors)
        parts = [name.rpartition(b"-") for name in block]
        code = np.array([anchors.get(base, -1) for base, _, _ in parts], dtype=np.int64)
        stratum = np.array([tail if c >= 0 else b"0" for (_, _, tail), c in zip(parts, code, strict=True)])
        first = np.flatnonzero(code < 0)
        code[first] = [anchors[block[i]] for i in first]
        strata.append(_to_integers(stratum, block))
        codes.append(code)
    return np.concatenate(strata), np.concatenate(codes)


def _add_bin(name: bytes, anchors: dict[bytes, int]) -> None:
    text = name.decode(errors="replace")
    if BIN.fullmatch(name) is None:
        raise DataError(
            f"feature name {text!r} does not parse, or its bin is not in stratum 0; expected 'chr1:0-500000' "
            "for a bin and 'chr1:0-500000-3' for its pair with the third bin after it, all bins first"
        )
    if name in anchors:
        raise DataError(f"the bin {text!r} comes twice in stratum 0; feature names must be unique")
    anchors[name] = len(anchors)


def _to_integers(tails: NDArray[np.bytes_], block: list[bytes]) -> NDArray[np.int64]:
    try:
        return tails.astype(np.int64)
    except ValueError:
        bad = next(n for n, tail in zip(block, tails, strict=True) if not tail.isdigit())
        raise DataError(
            f"feature name {bad.decode()!r} ends in no stratum; expected e.g. 'chr1:0-500000-3'"
        ) from None
