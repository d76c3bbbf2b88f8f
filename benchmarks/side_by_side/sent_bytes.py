"""Count the bytes that a rank hands to a collective."""

from typing import Any

from lightning_amp.footprint.live_bytes import COLLECTIVES, tensors_of

_KIND_AND_INPUT = {
    "all_reduce": ("all_reduce", 0),
    "allreduce_": ("all_reduce", 0),
    "all_gather_into_tensor": ("all_gather", 0),
    "_allgather_base_": ("all_gather", 1),
    "allgather_": ("all_gather", 1),
    "reduce_scatter_tensor": ("reduce_scatter", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "broadcast": ("broadcast", 0),
    "broadcast_": ("broadcast", 0),
    "all_to_all_single": ("all_to_all", 0),
    "alltoall_base_": ("all_to_all", 1),
}
"""Operator -> kind of collective, and index of its input; functional operators, and those that write in place."""
_SILENT = ("wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier_")


def sent_bytes(operator: Any, args: tuple[Any, ...]) -> tuple[str, int] | None:
    """Return the kind of a dispatched collective, and the bytes given to it; None for other operators.

    The count is the size of this rank's input, whatever the algorithm transfers: an all-reduce of n bytes counts n, an
    all-gather the own shard, a reduce-scatter all shards, a broadcast the tensor. Not counted are the few numbers with
    which the ranks of a real run check in every step that they agree on their batches.
    """
    if operator.namespace not in COLLECTIVES or operator._opname in _SILENT:
        return None
    assert operator._opname in _KIND_AND_INPUT, f"{operator._opname!r} is a collective that is not counted yet"
    kind, place = _KIND_AND_INPUT[operator._opname]
    return kind, sum(tensor.nbytes for tensor in tensors_of(args[place]))
