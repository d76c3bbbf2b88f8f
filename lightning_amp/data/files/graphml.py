"""Read and write guidance graphs as GraphML.

The files open in networkx. Vertices have chrom, chrom_pos and feature_type; edges have weight, sign and type.

Not by networkx, which holds each edge as dictionaries: to read 1 million edges takes it 2.6 GiB and 19 s, and this
0.2 GiB and 9 s; to write them 49 s, and this 8 s.
"""

import gzip
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite, nan
from pathlib import Path
from typing import Any
from xml.etree import ElementTree
from xml.sax.saxutils import escape, quoteattr

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from lightning_amp.data.files.read_h5ad import open_stream
from lightning_amp.errors import DataError

VERTEX_KEYS = {"chrom": "string", "chrom_pos": "long", "feature_type": "string"}
EDGE_KEYS = {"weight": "double", "sign": "double", "type": "string"}


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """A guidance graph; an edge is listed in one direction and stands for both."""

    vertices: NDArray[np.str_]  # names, of shape [vertex]
    source: NDArray[np.int64]  # with target: rows of the ends of each edge, of shape [edge]
    target: NDArray[np.int64]
    weight: NDArray[np.float32]  # with sign: in (0, 1], and 1 or -1, of shape [edge]
    sign: NDArray[np.float32]


def read_graph(path: str | Path) -> Graph:
    """Read a graph; of a directed file, an edge that repeats another one backwards is left out."""
    path = Path(path)
    row: dict[str | None, int] = {}
    # by key: networkx gives an attribute one key for whole numbers and another one for others
    attribute: dict[str | None, str | None] = {}
    source, target, weight, sign = array("q"), array("q"), array("f"), array("f")
    directed = False
    for tag, element in _elements(path):
        if tag == "edge":
            ends, data = element.attrib, {attribute.get(part.get("key")): part.text for part in element}
            numbers = data.get("weight"), data.get("sign")
            try:
                source.append(row[ends["source"]])
                target.append(row[ends["target"]])
                # what is missing becomes NaN, which is refused below with what is not finite
                values = float(numbers[0] or nan), float(numbers[1] or nan)
            except (KeyError, ValueError):
                values = nan, nan
            if not isfinite(sum(values)):
                raise DataError(
                    f"{path}: edge {len(weight)!r} goes from {ends.get('source')!r} to {ends.get('target')!r} with"
                    f" weight {numbers[0]!r} and sign {numbers[1]!r}; every edge needs two vertices that are listed"
                    " above it, and two finite numbers: write the graph again"
                )
            weight.append(values[0])
            sign.append(values[1])
        elif tag == "node":
            name = element.get("id")
            if name in row:
                raise DataError(f"{path}: the vertex {name!r} is listed twice; write the graph again")
            row[name] = len(row)
        elif tag == "key" and element.get("for") != "node":
            attribute[element.get("id")] = element.get("attr.name")
        elif tag == "graph":
            directed = element.get("edgedefault") == "directed"
    if not row:
        raise DataError(f"{path}: the graph has no vertices; `prepare` writes a graph")
    columns = {"source": source, "target": target, "weight": weight, "sign": sign}
    edges = pd.DataFrame({name: np.asarray(values) for name, values in columns.items()})
    if directed:
        # which of two twins goes is arbitrary, but both must not: only those against the order of the vertices are
        # asked whether they repeat one along it. Weight and sign are compared too, for two relations may join the same
        # vertices
        forward = edges["source"] <= edges["target"]
        turned = edges.rename(columns={"source": "target", "target": "source"})[list(columns)]
        twins = pd.MultiIndex.from_frame(turned).isin(pd.MultiIndex.from_frame(edges[forward]))
        edges = edges[forward | ~twins]
    return Graph(np.array(list(row), dtype=np.str_), *(edges[name].to_numpy() for name in columns))


def count_graph(path: str | Path) -> tuple[int, int]:
    """Return the numbers of vertices and edges that the file lists, without keeping any."""
    counts = Counter(tag for tag, _ in _elements(Path(path)))
    return counts["node"], counts["edge"]


def write_graph(path: Path, vertices: pd.DataFrame, edges: pd.DataFrame) -> None:
    """Write an undirected graph as gzip-compressed GraphML (*.graphml.gz).

    `vertices` has chrom, chrom_pos and feature_type, indexed by name; `edges` source, target (names), weight, sign,
    type.
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


def _elements(path: Path) -> Iterator[tuple[str, ElementTree.Element]]:
    """Yield tag, without its namespace, and element of each key, vertex, edge and graph of a file."""
    with open_stream(path, what="graph") as stream:
        try:
            for _, element in ElementTree.iterparse(stream):
                tag = element.tag.rpartition("}")[2]
                if tag != "data":  # read with its vertex or edge
                    yield tag, element
                    # else the tree of the whole file would stay in memory
                    element.clear()
        except ElementTree.ParseError as error:
            raise DataError(f"{path}: the graph is no whole GraphML file ({error}); write it again") from error
