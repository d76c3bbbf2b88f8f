"""Run the tables of tests/dist through other tensors that are split over ranks, on 2 ranks and CPUs.

    python -m benchmarks.domain.peers [--peers ours dtensor physicsnemo context_parallel] [--format json] [--each 1]

Peers are torch's DTensor, the ShardTensor of NVIDIA physicsnemo, and torch's context_parallel, which has attention
only; what is not installed is left out. A case gives each peer the same parts (torch.chunk), and whole tensors as
replicated ones; its results and all gradients (`full_tensor()`) are compared with one process in float64. A case is

    exact     to 1e-10
    wrong     the rest, without an error
    refused   where every rank raises an error
    hangs     where ranks give no answer for 20 seconds, end, or only some of them raise an error

Cases that one process cannot run itself are left out.
"""

import argparse
import importlib.util
import json
import multiprocessing
import os
import socket
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel, implicit_replication
from torch.distributed.tensor.experimental._attention import context_parallel_unshard

from lightning_amp.dist.dispatch.guards import guarded
from lightning_amp.dist.ops import ShardedTensor
from lightning_amp.dist.owners import Owners
from lightning_amp.dist.sharded_tensor import redistribute
from lightning_amp.dist.splits import WHOLE, Split, Splits, axis_of
from tests.dist.check import difference, leaves_of
from tests.dist.table.case import Case, case, made
from tests.dist.table.classes import CLASSES
from tests.dist.table.layers import LAYERS
from tests.dist.table.modules import MODULES
from tests.dist.table.odd import ODD
from tests.dist.table.places import PLACES
from tests.dist.table.products import PRODUCTS
from tests.dist.table.steps import STEPS
from tests.dist.table.values import VALUES

RANKS = 2
PATIENCE_S = 20.0
OWN = ("split along", "split and", "split in", "whole by hand")
"""Beginnings of the names of cases that call methods of ours."""
NOT_COMPARED = ("data_ptr", "dlpack", "random numbers of a generator", "random numbers with a gradient")
"""Cases of addresses in memory, or whose random numbers depend on the ranks."""


def _sdpa(causal: bool) -> Callable[..., Tensor]:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal)


ATTENTION = [
    case(f"attention of {n} rows, causal {causal}", _sdpa(causal), *[(2, 3, n, 4)] * 3, at={0: 2, 1: 2, 2: 2})
    for n in (8, 9)
    for causal in (False, True)
]
TABLES: dict[str, list[Case]] = {
    "values, reductions, scans": VALUES,
    "views, slices, lookups": PLACES,
    "products, attention, FFT": PRODUCTS,
    "convolutions, pools, norms, losses": LAYERS,
    "images, volumes, points, models": [c for c in CLASSES if not c.name.startswith(OWN)],
    "odd expressions, modules": [*ODD, *STEPS, *MODULES],
}


class Tensors(NamedTuple):
    """How a library splits tensors.

    Attributes:
        split: A leaf of a tensor, split along a dim, or replicated where it is None.
        whole: The whole tensor of a result, with gradients.
        gradient: The whole gradient of a leaf.
        step: What a step runs in.
    """

    split: Callable[[Tensor, int | None, DeviceMesh], Any]
    whole: Callable[[Any], Any]
    gradient: Callable[[Any, Tensor, DeviceMesh], Tensor | None]
    step: Callable[[DeviceMesh], AbstractContextManager[Any]]


def _ours(t: Tensor, dim: int | None, mesh: DeviceMesh) -> Any:
    axis = axis_of(mesh)
    splits = WHOLE if dim is None else Splits.of([Split(axis, dim, Owners.even(t.shape[dim], axis.size))])
    return redistribute(t, splits)


def _our_gradient(_: Any, t: Tensor, mesh: DeviceMesh) -> Tensor | None:
    if not t.requires_grad:
        return None
    grad = torch.zeros_like(t) if t.grad is None else t.grad
    dist.all_reduce(grad, group=mesh.get_group())
    return grad / mesh.size()


def _dtensor(t: Tensor, dim: int | None, mesh: DeviceMesh) -> Any:
    placements = [Replicate() if dim is None else Shard(dim)]
    return distribute_tensor(t.detach(), mesh, placements).requires_grad_(t.requires_grad)


def _full(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, DTensor) or type(x).__name__ == "ShardTensor" else x


def _full_gradient(leaf: Any, t: Tensor, mesh: DeviceMesh) -> Tensor | None:
    if not t.requires_grad:
        return None
    return torch.zeros_like(t) if leaf.grad is None else _full(leaf.grad)


def _shard_tensor(t: Tensor, dim: int | None, mesh: DeviceMesh) -> Any:
    from physicsnemo.domain_parallel import ShardTensor

    found = ShardTensor.from_dtensor(_dtensor(t.detach(), dim, mesh))
    return found.detach().requires_grad_(t.requires_grad)


OURS = Tensors(
    _ours,
    lambda x: x.full_tensor() if isinstance(x, ShardedTensor) else x,
    _our_gradient,
    lambda mesh: guarded([axis_of(mesh)]),
)
DTENSOR = Tensors(_dtensor, _full, _full_gradient, lambda _: implicit_replication())
SHARD_TENSOR = Tensors(_shard_tensor, _full, _full_gradient, lambda _: nullcontext())


def _loss(results: list[Any]) -> Tensor:
    draw, loss = torch.Generator().manual_seed(3), torch.zeros((), dtype=torch.float64)
    for t in results:
        if isinstance(t, Tensor) and t.requires_grad:
            loss = loss + (t * torch.randn(t.shape, generator=draw, dtype=torch.float64)).abs().pow(2).sum()
    return loss


def judged(one: Case, mesh: DeviceMesh, peer: Tensors) -> tuple[str, str]:
    """What a peer makes of a case, and why; "" where one process cannot run it."""
    torch.manual_seed(len(one.name))
    whole = [t.requires_grad_(t.is_floating_point()) for t in made(one.inputs)]
    if one.name in NOT_COMPARED or any(whole[i].shape[one.dims(i)[0]] < RANKS for i in one.at):
        return "", ""
    torch.manual_seed(7)
    try:
        results = leaves_of(one.call(*whole))
        loss = _loss(results)
        if loss.requires_grad:
            loss.backward()
    except Exception:
        return "", ""
    right = [*results, *[None if not t.requires_grad else t.grad for t in whole]]
    given = [t.detach().clone().requires_grad_(t.requires_grad) for t in whole]
    torch.manual_seed(7)
    try:
        leaves = [peer.split(t, (*one.dims(i), None)[0], mesh) for i, t in enumerate(given)]
        with peer.step(mesh):
            results = [peer.whole(t) for t in leaves_of(one.call(*leaves))]
        loss = _loss(results)
        if loss.requires_grad:
            loss.backward()
        found = [*results, *[peer.gradient(leaf, t, mesh) for leaf, t in zip(leaves, given, strict=True)]]
    except Exception as error:
        return _refused(error)
    return _compared(found, right, one.tolerance)


def _refused(error: Exception) -> tuple[str, str]:
    return "refused", f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _compared(found: list[Any], right: list[Any], tolerance: float) -> tuple[str, str]:
    if len(found) != len(right):
        return "wrong", f"{len(found)} results for {len(right)}"
    pairs = [
        (a, torch.zeros_like(a) if b is None and isinstance(a, Tensor) else b)
        for a, b in zip(found, right, strict=True)
        if a is not None
    ]
    apart = max((difference(a, b) for a, b in pairs), default=0.0)
    return ("exact", "") if apart <= tolerance else ("wrong", f"differs by {apart:.1e}")


def attention_judged(one: Case, mesh: DeviceMesh) -> tuple[str, str]:
    """What context_parallel makes of attention; it cuts tensors in place, and the gradient of the result with them."""
    torch.manual_seed(7)
    whole = [t.requires_grad_() for t in made(one.inputs)]
    out = one.call(*whole)
    given = [*[t.detach().clone() for t in whole], torch.randn_like(out)]
    out.backward(given[-1])
    right = [out.detach(), *[t.grad for t in whole]]
    try:
        with context_parallel(mesh, buffers=given, buffer_seq_dims=[2] * len(given)):
            leaves = [t.detach().clone().requires_grad_() for t in given[:-1]]
            out = one.call(*leaves)
            out.backward(given[-1])
            parts = [out.detach(), *[t.grad for t in leaves]]
            found = context_parallel_unshard(mesh, parts, [2] * len(parts))
    except Exception as error:
        return _refused(error)
    return _compared(found, right, one.tolerance)


class Peer(NamedTuple):
    """A library.

    Attributes:
        needs: The module to be installed.
        judge: What it makes of a case on a mesh, and why.
        tables: The cases that it is given.
    """

    needs: str
    judge: Callable[[Case, DeviceMesh], tuple[str, str]]
    tables: dict[str, list[Case]]


PEERS = {
    "ours": Peer("torch", partial(judged, peer=OURS), TABLES),
    "dtensor": Peer("torch", partial(judged, peer=DTENSOR), TABLES),
    "physicsnemo": Peer("physicsnemo", partial(judged, peer=SHARD_TENSOR), TABLES),
    "context_parallel": Peer("torch", attention_judged, {"attention": ATTENTION}),
}


def _rank(rank: int, name: str, port: int, start: int, each: int, answers: Connection) -> None:
    """Judge every case from a number on, one answer for each."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # what a peer prints is no result
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    store = dist.TCPStore("localhost", port, RANKS, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    if name == "physicsnemo":
        from physicsnemo.distributed import DistributedManager
        from physicsnemo.domain_parallel import register_custom_ops

        # its manager of processes expects GPUs, and its operators are registered where there is one
        DistributedManager.initialize()
        register_custom_ops()
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("model",))
    peer = PEERS[name]
    for _, one in _cases(peer, each)[start:]:
        answers.send(peer.judge(one, mesh))
        # ranks go on together
        answers.recv()


def _cases(peer: Peer, each: int) -> list[tuple[str, Case]]:
    return [(table, one) for table, cases in peer.tables.items() for one in cases][::each]


def answers_of(name: str, each: int) -> Iterator[tuple[str, str, str, str]]:
    """Table, case, kind and reason of every case; processes start anew after a case in which ranks part."""
    cases, at = _cases(PEERS[name], each), 0
    context = multiprocessing.get_context("spawn")
    while at < len(cases):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        pipes = [context.Pipe() for _ in range(RANKS)]
        ranks = [
            context.Process(target=_rank, args=(r, name, port, at, each, theirs), daemon=True)
            for r, (_, theirs) in enumerate(pipes)
        ]
        for process in ranks:
            process.start()
        for _, theirs in pipes:
            theirs.close()
        # torch is imported first
        patience = 180.0
        while at < len(cases):
            found = [_answer(ours, patience) for ours, _ in pipes]
            patience, (table, one) = PATIENCE_S, cases[at]
            at += 1
            kinds = {kind for kind, _ in found}
            if len(kinds) == 1 and kinds != {"hangs"}:
                yield table, one.name, *found[0]
            elif kinds == {"exact", "wrong"}:
                yield table, one.name, "wrong", next(why for kind, why in found if kind == "wrong")
            else:
                yield table, one.name, "hangs", " | ".join(f"{kind} {why}" for kind, why in found)
                break
            for ours, _ in pipes:
                ours.send("go on")
        for process in ranks:
            process.kill()
            process.join()


def _answer(pipe: Connection, patience: float) -> tuple[str, str]:
    if not wait([pipe], patience):
        return "hangs", "no answer"
    try:
        kind, why = pipe.recv()
    except EOFError:
        return "hangs", "the process ended"
    return kind, why


def main() -> None:
    """Print one table of counts for each peer."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--format", choices=("table", "json"), default="table")
    parser.add_argument("--each", type=int, default=1, help="run one case of so many")
    asked = parser.parse_args()
    every = dict[str, list[tuple[str, str, str, str]]]()
    for name in asked.peers:
        if importlib.util.find_spec(PEERS[name].needs) is None:
            print(f"{name}: {PEERS[name].needs!r} is not installed", file=sys.stderr)
            continue
        every[name] = [answer for answer in answers_of(name, asked.each) if answer[2]]
    if asked.format == "json":
        print(json.dumps(every, indent=1))
        return
    print("| peer | cases | exact | wrong | refused | hangs |\n|---|---|---|---|---|---|")
    for name, answers in every.items():
        for table in [*PEERS[name].tables, "all"]:
            counts = Counter(kind for of, _, kind, _ in answers if table in (of, "all"))
            numbers = [counts.total(), *(counts[kind] for kind in ("exact", "wrong", "refused", "hangs"))]
            print("|", " | ".join([f"{name}: {table}", *map(str, numbers)]), "|")


if __name__ == "__main__":
    main()
