"""Run the tables of tests/sharding through other libraries' tensors that are split over ranks, on 2 ranks and CPUs.

    python -m benchmarks.domain.peers [--peers ours dtensor physicsnemo context_parallel] [--each 3] [--quick]

Peers are torch's DTensor, the ShardTensor of NVIDIA physicsnemo, and torch's context_parallel, which has attention
only; what is not installed is left out. A case gives each peer the same parts (torch.chunk), and whole tensors as
replicated ones; its results and all gradients (`full_tensor()`) are compared with one process in float64. A case is

    exact     to its tolerance, 1e-10 as a rule
    wrong     the rest, without an error
    refused   where every rank raises an error
    hangs     where ranks give no answer for 20 seconds, end, or only some of them raise an error

Cases that one process cannot run itself are left out. `--each N` runs every Nth case; all take a quarter of an hour,
with --quick (every 60th, without physicsnemo) half a minute.
"""

import argparse
import importlib.util
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel, implicit_replication
from torch.distributed.tensor.experimental._attention import context_parallel_unshard

from benchmarks.tensor3d.ranks import Ranks
from lightning_amp.sharding.dispatch.guards import guarded
from lightning_amp.sharding.owners import Owners
from lightning_amp.sharding.sharded_tensor import redistribute
from lightning_amp.sharding.splits import WHOLE, MeshAxis, Split, Splits
from tests.sharding.table.case import Case, case, made
from tests.sharding.test_operators import CASES, REST, difference, leaves_of, whole

RANKS, PATIENCE_S = 2, 20.0
NOT_COMPARED = ("split along", "split and", "split in", "whole by hand", "data_ptr", "dlpack",
                "random numbers of a generator", "random numbers with a gradient")  # fmt: skip
"""Beginnings of the names of cases that call methods of ours, of addresses, or whose random numbers are a rank's."""
ATTENTION = [
    case(
        f"attention of {n} rows, causal {causal}",
        lambda q, k, v, causal=causal: F.scaled_dot_product_attention(q, k, v, is_causal=causal),
        *[(2, 3, n, 4)] * 3,
        at={0: 2, 1: 2, 2: 2},
    )
    for n in (8, 9)
    for causal in (False, True)
]
TABLE = [one for one in [*CASES, *REST] if not one.name.startswith(NOT_COMPARED)]
Verdict = tuple[str, str]
"""What a peer makes of a case, and why; "" where one process cannot run it."""


class Tensors(NamedTuple):
    """How a library splits tensors.

    Attributes:
        split: A leaf of a tensor, split along a dim, or replicated where it is None.
        whole: The whole tensor of a result, with gradients.
        step: What a step runs in.
    """

    split: Callable[[Tensor, int | None, DeviceMesh], Any]
    whole: Callable[[Any], Any]
    step: Callable[[DeviceMesh], AbstractContextManager[Any]]


def _axis(mesh: DeviceMesh) -> MeshAxis:
    return MeshAxis("model", mesh.size(), mesh.get_local_rank(), mesh.get_group())


def _ours(t: Tensor, dim: int | None, mesh: DeviceMesh) -> Any:
    axis = _axis(mesh)
    splits = WHOLE if dim is None else Splits.of([Split(axis, dim, Owners.even(t.shape[dim], axis.size))])
    return redistribute(t, splits)


def _dtensor(t: Tensor, dim: int | None, mesh: DeviceMesh) -> Any:
    placements = [Replicate() if dim is None else Shard(dim)]
    return distribute_tensor(t.detach(), mesh, placements).requires_grad_(t.requires_grad)


def _shard_tensor(t: Tensor, dim: int | None, mesh: DeviceMesh) -> Any:
    from physicsnemo.domain_parallel import ShardTensor

    found = ShardTensor.from_dtensor(_dtensor(t.detach(), dim, mesh))
    return found.detach().requires_grad_(t.requires_grad)


def _full(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, DTensor) or type(x).__name__ == "ShardTensor" else x


OURS = Tensors(_ours, whole, lambda mesh: guarded([_axis(mesh)]))
LIBRARIES = {
    "ours": OURS,
    "dtensor": Tensors(_dtensor, _full, lambda _: implicit_replication()),
    "physicsnemo": Tensors(_shard_tensor, _full, lambda _: nullcontext()),
}


def _gradient(peer: Tensors, leaf: Any, t: Tensor, mesh: DeviceMesh) -> Tensor | None:
    if not t.requires_grad:
        return None
    own = t if peer is OURS else leaf
    grad: Tensor = torch.zeros_like(t) if own.grad is None else peer.whole(own.grad)
    if peer is OURS:
        # the gradient of a tensor of which every rank holds a part is the mean over the ranks
        dist.all_reduce(grad, group=mesh.get_group())
        grad = grad / mesh.size()
    return grad


def _backward(results: list[Any]) -> None:
    draw, loss = torch.Generator().manual_seed(3), torch.zeros((), dtype=torch.float64)
    for t in results:
        if isinstance(t, Tensor) and t.requires_grad:
            loss = loss + (t * torch.randn(t.shape, generator=draw, dtype=torch.float64)).abs().pow(2).sum()
    if loss.requires_grad:
        loss.backward()


def judged(one: Case, mesh: DeviceMesh, peer: Tensors) -> Verdict:
    """A case by the tensors of a peer."""
    torch.manual_seed(len(one.name))
    inputs = [t.requires_grad_(t.is_floating_point()) for t in made(one.inputs)]
    if any(inputs[i].shape[one.dims(i)[0]] < RANKS for i in one.at):
        return "", ""
    torch.manual_seed(7)
    try:
        results = leaves_of(one.call(*inputs))
        _backward(results)
    except Exception:
        return "", ""
    right = [*results, *[t.grad if t.requires_grad else None for t in inputs]]
    given = [t.detach().clone().requires_grad_(t.requires_grad) for t in inputs]
    torch.manual_seed(7)
    try:
        leaves = [peer.split(t, (*one.dims(i), None)[0], mesh) for i, t in enumerate(given)]
        with peer.step(mesh):
            results = [peer.whole(t) for t in leaves_of(one.call(*leaves))]
        _backward(results)
        found = [*results, *[_gradient(peer, leaf, t, mesh) for leaf, t in zip(leaves, given, strict=True)]]
    except Exception as error:
        return _refused(error)
    return _compared(found, right, one.tolerance)


def attention_judged(one: Case, mesh: DeviceMesh) -> Verdict:
    """Attention by context_parallel; it cuts tensors in place, and the gradient of the result with them."""
    torch.manual_seed(7)
    inputs = [t.requires_grad_() for t in made(one.inputs)]
    out = one.call(*inputs)
    given = [*[t.detach().clone() for t in inputs], torch.randn_like(out)]
    out.backward(given[-1])
    right = [out.detach(), *[t.grad for t in inputs]]
    try:
        with context_parallel(mesh, buffers=given, buffer_seq_dims=[2] * len(given)):
            leaves = [t.detach().clone().requires_grad_() for t in given[:-1]]
            out = one.call(*leaves)
            out.backward(given[-1])
            parts = [out.detach(), *[t.grad for t in leaves]]
            found = context_parallel_unshard(mesh, parts, [2] * len(parts))
    except Exception as error:
        return _refused(error)
    return _compared([*found], right, one.tolerance)


def _refused(error: Exception) -> Verdict:
    return "refused", f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _compared(found: list[Any], right: list[Any], tolerance: float) -> Verdict:
    if len(found) != len(right):
        return "wrong", f"{len(found)} results for {len(right)}"
    pairs = [(a, b) for a, b in zip(found, right, strict=True) if a is not None]
    apart = max((difference(a, torch.zeros_like(a) if b is None else b) for a, b in pairs), default=0.0)
    return ("exact", "") if apart <= tolerance else ("wrong", f"differs by {apart:.1e}")


@cache
def _mesh(name: str) -> DeviceMesh:
    """Of this process; a peer is made ready with it."""
    if name == "physicsnemo":
        from physicsnemo.distributed import DistributedManager
        from physicsnemo.domain_parallel import register_custom_ops

        # its manager of processes expects GPUs, and its operators are registered where there is one
        DistributedManager.initialize()
        register_custom_ops()
    return init_device_mesh("cpu", (RANKS,), mesh_dim_names=("model",))


def on_rank(rank: int, ranks: int, name: str, at: int) -> Verdict:
    """Judge a case of `cases_of` by its number; -1 makes the peer ready."""
    if at < 0:
        _mesh(name)
        return "", ""
    one = cases_of(name)[at]
    if name == "context_parallel":
        return attention_judged(one, _mesh(name))
    return judged(one, _mesh(name), LIBRARIES[name])


def cases_of(name: str) -> list[Case]:
    """What a peer is given."""
    return ATTENTION if name == "context_parallel" else TABLE


def started(name: str) -> Ranks:
    """Ranks whose start is no part of a case."""
    pool = Ranks(RANKS, on_rank, patience=PATIENCE_S)
    pool.results(name, -1)
    return pool


def verdicts(name: str, each: int) -> Iterator[tuple[str, str, str]]:
    """Case, verdict and reason; processes start anew after a case in which ranks part."""
    pool = started(name)
    for at in range(0, len(cases_of(name)), each):
        answers = [value if kind == "done" else ("hangs", f"{kind} {value}") for kind, value in pool.ask(name, at)]
        kinds = {kind for kind, _ in answers}
        if len(kinds) > 1 and kinds != {"exact", "wrong"}:
            answers, kinds = [("hangs", str(answers))], {"hangs"}
        kind, why = max(answers)
        if kinds == {"hangs"}:
            pool.end()
            pool = started(name)
        yield cases_of(name)[at].name, kind, why
    pool.end()


NEEDS = {"ours": "torch", "dtensor": "torch", "physicsnemo": "physicsnemo", "context_parallel": "torch"}
"""The package of each peer."""


def main() -> None:
    """Print a row of counts for each peer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", nargs="+", choices=NEEDS, default=list(NEEDS))
    parser.add_argument("--each", type=int, default=1, help="run one case of so many")
    parser.add_argument("--list", default="hangs", help="print the cases of this verdict")
    parser.add_argument("--quick", action="store_true", help="every 60th case, without physicsnemo")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    each = 60 if asked.quick else asked.each
    print("| peer | cases | exact | wrong | refused | hangs |\n|---|---|---|---|---|---|")
    for name in asked.peers:
        if importlib.util.find_spec(NEEDS[name]) is None or (asked.quick and name == "physicsnemo"):
            print(f"{name}: left out; it needs the package {NEEDS[name]!r}", file=sys.stderr)
            continue
        found = [one for one in verdicts(name, 1 if name == "context_parallel" and not asked.quick else each) if one[1]]
        for case_name, _, why in (one for one in found if one[1] == asked.list):
            print(f"{name}, {case_name!r}: {why}", file=sys.stderr)
        counts = Counter(kind for _, kind, _ in found)
        cells = counts.total(), *(counts[kind] for kind in ("exact", "wrong", "refused", "hangs"))
        print("|", " | ".join([name, *map(str, cells)]), "|", flush=True)


if __name__ == "__main__":
    main()
