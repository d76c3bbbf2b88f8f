"""S4: the keys of a stratum's anchors are selected before the product with the cells.

    (u key^T)[:, nodes] = u key[nodes]^T

Exact: every entry is the same inner product (the matrix product may round its sums in another order). No
collectives. What shrinks: the products [B, N] of all anchors become the [B, F_k] that are asked for. The
selected keys [F_k, D] are the price; when the nodes are a run of anchors they are a view and cost nothing.
With fewer cells than dimensions and F_k near N the price is the higher of the two.

Legend: cell (B), anchor (N), dim (D), feature (F_k of the stratum).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_amp._torch import FakeTensor
from lightning_amp.errors import InstallError
from lightning_amp.parallel.checks.decode import decode_problem
from lightning_amp.shapes import Counts, FeatureAnchor, PerAnchor, PerCell


def key_first(decode: nn.Module) -> nn.Module:
    """The same decode, with the keys selected first.

    Raises:
        InstallError: The module has state of its own, or decode(u, key, nodes) is not (u key^T)[:, nodes].
    """
    problem = decode_problem(decode)
    if problem:
        raise InstallError(
            f"S4 was asked for on {type(decode).__name__!r}, which {problem}; only a module without state"
            " that returns (u @ key.T)[:, nodes] when called as decode(u, key, nodes) can be replaced: move"
            " the rest to the stratum, or leave S4 out"
        )
    return KeyFirstDecode()


class KeyFirstDecode(nn.Module):
    """Decode from selected keys; made by `key_first`.

    Whether the nodes are a run of anchors is read once per tensor, because reading waits for the device.
    Nodes without values (meta and fake tensors) are gathered: that needs more memory than a view, never less.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: Tensor | None = None
        self._version = 0
        self._start: int | None = None

    def forward(self, u: PerCell, key: PerAnchor, nodes: FeatureAnchor) -> Counts:
        """(u key^T)[:, nodes], through key[nodes]."""
        version = 0 if nodes.is_inference() else nodes._version
        if nodes is not self._seen or version != self._version:
            self._seen, self._version, self._start = nodes, version, _start_of_run(nodes)
        return u @ _select(key, nodes, self._start).T


def _select(key: Tensor, nodes: Tensor, start: int | None) -> Tensor:
    if start is None:
        # The backward pass of embedding fills one [N, D], that of indexing two, and is slower.
        return F.embedding(nodes, key)
    return key if (start, len(nodes)) == (0, len(key)) else key.narrow(0, start, len(nodes))


def _start_of_run(nodes: Tensor) -> int | None:
    if nodes.is_meta or isinstance(nodes, FakeTensor) or not len(nodes):
        return None
    start = int(nodes[0])
    run = torch.arange(start, start + len(nodes), dtype=nodes.dtype, device=nodes.device)
    return start if torch.equal(nodes, run) else None
