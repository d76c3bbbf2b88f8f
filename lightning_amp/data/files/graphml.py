"""Reads and writes guidance graphs as GraphML, streaming.

A general graph library holds each edge as a dictionary; the graphs here have up to millions of edges. The
files are ordinary GraphML and open in networkx. Vertices carry chrom, chrom_pos and feature_type, edges
weight, sign, type.
"""

import gzip
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.parsers import expat
from xml.sax.saxutils import escape, quoteattr

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from lightning_amp.data.files.open_text import open_stream
from lightning_amp.errors import DataError

VERTEX_KEYS = {"chrom": "string", "chrom_pos": "long", "feature_type": "string"}
EDGE_KEYS = {"weight": "double", "sign": "double", "type": "string"}


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """A guidance graph; every pair of vertices is listed in one direction only and means both.

    Attributes:
        vertices: Names, of shape [vertex].
        feature_type: "RNA", "Hi-C", ...; "" where the file has none; of shape [vertex].
        source, target: Rows of the ends of each edge, of shape [edge].
        weight, sign: In (0, 1], and 1 or -1, of shape [edge].
    """

    vertices: NDArray[np.str_]
    feature_type: NDArray[np.str_]
    source: NDArray[np.int64]
    target: NDArray[np.int64]
    weight: NDArray[np.float32]
    sign: NDArray[np.float32]


def read_graph(path: str | Path) -> Graph:
    """Read a graph; in a directed file, an edge that repeats another one backwards is left out.

    Raises:
        DataError: The file cannot be read, or an edge lacks weight, sign or a known vertex.
    """
    path = Path(path)
    reader = _Reader()
    _parse(path, reader.start, reader.end, reader.text)
    if not reader.names:
        raise DataError(f"{path}: the graph has no vertices; `prepare` writes a graph")
    row = {name: i for i, name in enumerate(reader.names)}
    if len(row) != len(reader.names):
        raise DataError(
            f"{path}: the graph has {len(reader.names) - len(row)!r} repeated vertices; write it again"
        )
    unknown = next((v for ends in (reader.source, reader.target) for v in ends if v not in row), None)
    if unknown is not None:
        raise DataError(
            f"{path}: an edge ends at {unknown!r}, which is no vertex of the graph; write it again"
        )
    source = np.array([row[v] for v in reader.source], dtype=np.int64)
    target = np.array([row[v] for v in reader.target], dtype=np.int64)
    weight, sign = (_to_numbers(path, name, values) for name, values in reader.numbers.items())
    kept = _drop_reversed(source, target, weight, sign) if reader.directed else np.full(len(source), True)
    return Graph(
        np.array(reader.names, dtype=np.str_),
        np.array(reader.types, dtype=np.str_),
        source[kept],
        target[kept],
        weight[kept],
        sign[kept],
    )


def count_graph(path: str | Path) -> tuple[int, int]:
    """Return the numbers of vertices and edges that the file lists, without keeping any.

    Raises:
        DataError: The file cannot be read.
    """
    counts = {"node": 0, "edge": 0}

    def start(tag: str, attributes: dict[str, str]) -> None:
        if tag in counts:
            counts[tag] += 1

    _parse(Path(path), start)
    return counts["node"], counts["edge"]


def write_graph(path: Path, vertices: pd.DataFrame, edges: pd.DataFrame) -> None:
    """Write an undirected graph as gzip-compressed GraphML (*.graphml.gz).

    Args:
        path: The file.
        vertices: chrom, chrom_pos, feature_type, indexed by name.
        edges: source, target (names), weight, sign, type.
    """
    # A fixed time stamp: the same graph gives the same bytes.
    with path.open("wb") as raw, gzip.GzipFile("", "wb", compresslevel=4, fileobj=raw, mtime=0) as stream:
        stream.write(b"<?xml version='1.0' encoding='utf-8'?>\n")
        stream.write(b'<graphml xmlns="http://graphml.graphdrawing.org/xmlns">\n')
        for element, keys in (("node", VERTEX_KEYS), ("edge", EDGE_KEYS)):
            for name, kind in keys.items():
                key = f'<key id="{name}" for="{element}" attr.name="{name}" attr.type="{kind}"/>\n'
                stream.write(key.encode())
        stream.write(b'<graph edgedefault="undirected">\n')
        for name, *values in vertices[list(VERTEX_KEYS)].itertuples(name=None):
            stream.write(f"<node id={quoteattr(name)}>{_data(VERTEX_KEYS, values)}</node>\n".encode())
        columns = [edges[name] for name in ("source", "target", *EDGE_KEYS)]
        for source, target, *values in zip(*columns, strict=True):
            ends = f"source={quoteattr(source)} target={quoteattr(target)}"
            stream.write(f"<edge {ends}>{_data(EDGE_KEYS, values)}</edge>\n".encode())
        stream.write(b"</graph>\n</graphml>\n")


def _data(keys: dict[str, str], values: list[Any]) -> str:
    pairs = zip(keys, values, strict=True)
    return "".join(f'<data key="{key}">{escape(str(value))}</data>' for key, value in pairs)


class _Reader:
    """Collects what a graph needs from the events of the XML parser; other data is passed over."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.types: list[str] = []
        self.source: list[str] = []
        self.target: list[str] = []
        self.numbers: dict[str, list[str]] = {"weight": [], "sign": []}
        self.directed = False
        self._keys: dict[tuple[str, str], str] = {}
        self._element = ""
        self._values: dict[str, str] = {}
        self._key: str | None = None

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        if tag == "data":
            self._key = self._keys.get((self._element, attributes["key"]))
        elif tag == "edge":
            self._element, self._values = tag, {}
            self.source.append(attributes["source"])
            self.target.append(attributes["target"])
        elif tag == "node":
            self._element, self._values = tag, {}
            self.names.append(attributes["id"])
        elif tag == "key":
            # A key may serve vertices, edges or all; the same id may name different things for each.
            for element in ("node", "edge"):
                if attributes.get("for", "all") in {element, "all"}:
                    self._keys[element, attributes["id"]] = attributes.get("attr.name", attributes["id"])
        elif tag == "graph":
            self.directed = attributes.get("edgedefault") == "directed"

    def text(self, text: str) -> None:
        if self._key is not None:
            self._values[self._key] = self._values.get(self._key, "") + text

    def end(self, tag: str) -> None:
        if tag == "data":
            self._key = None
        elif tag == "edge":
            for name, values in self.numbers.items():
                values.append(self._values.get(name, ""))
        elif tag == "node":
            self.types.append(self._values.get("feature_type", ""))


def _parse(
    path: Path,
    start: Callable[[str, dict[str, str]], None],
    end: Callable[[str], None] | None = None,
    text: Callable[[str], None] | None = None,
) -> None:
    """Run the XML parser over a file, calling back for each element."""
    parser = expat.ParserCreate()
    parser.buffer_text = True
    parser.StartElementHandler, parser.EndElementHandler, parser.CharacterDataHandler = start, end, text
    with open_stream(path, what="graph") as stream:
        try:
            parser.ParseFile(stream)
        except expat.ExpatError as error:
            raise DataError(
                f"{path}: the graph is no whole GraphML file ({error}); write it again"
            ) from error
        except KeyError as error:
            raise DataError(
                f"{path}: line {parser.CurrentLineNumber} of the graph lacks the attribute {error}; write it "
                "again"
            ) from error


def _to_numbers(path: Path, name: str, values: list[str]) -> NDArray[np.float32]:
    numbers: NDArray[np.float32]
    numbers = pd.to_numeric(pd.Series(values, dtype=object), errors="coerce").to_numpy(np.float32)
    bad = np.flatnonzero(~np.isfinite(numbers))
    if len(bad):
        raise DataError(
            f"{path}: edge {int(bad[0])!r} has {name} {values[bad[0]]!r}; every edge needs a finite number, write the"
            " graph again"
        )
    return numbers


def _drop_reversed(
    source: NDArray[np.int64],
    target: NDArray[np.int64],
    weight: NDArray[np.float32],
    sign: NDArray[np.float32],
) -> NDArray[np.bool_]:
    """Mark the edges to keep: all but those from a higher to a lower row whose mirror image is there too."""
    forward = source <= target
    table = pd.DataFrame({"low": np.minimum(source, target), "high": np.maximum(source, target)})
    table["weight"], table["sign"] = weight, sign
    twins = pd.MultiIndex.from_frame(table[~forward]).isin(pd.MultiIndex.from_frame(table[forward]))
    kept = forward.copy()
    kept[~forward] = ~twins
    return kept
