"""Send activations and the states of random numbers forward between stages, and gradients back.

A receiver knows the shapes, for it has placeholders of what it waits for; so nothing but values is sent, and
micro-batches may differ in size. That sender and receiver mean the same is compared (`_print_of`): a block whose result
has a shape, or a number besides tensors, that its inputs do not fix is refused. Every tensor of a micro-batch has a
tag of its own, and order does not matter. Which tensors have a gradient is sent back before the gradients: a parameter
that none of them reaches has none here either, and its optimiser leaves it alone.

The state of torch's, NumPy's and Python's random numbers goes with a micro-batch from stage to stage: a draw depends on
the seed alone, and neither on the number of stages nor on the order in which a rank runs passes.

Known limit: generators that a module or a data set keeps for itself.
"""

import hashlib
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work
from torch.distributed.device_mesh import DeviceMesh

from lightning_amp._torch import tree_flatten, tree_leaves, tree_unflatten
from lightning_amp.errors import InstallError


def seed_draws(seed: int) -> None:
    """Begin anew."""
    # not torch.manual_seed: it writes down its stack for every kind of device that is not in use, 3 ms a micro-batch
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def packed_draws() -> Tensor:
    """Where the random numbers are: bytes of one length."""
    version, words, gauss = random.getstate()
    _, keys, place, has_gauss, cached = np.random.get_state(legacy=True)
    numbers = np.array([version, place, has_gauss, gauss is not None], np.int64)
    others = [np.array(words, np.uint32), np.asarray(keys), numbers, np.array([gauss or 0.0, cached])]
    packed = bytearray(b"".join(part.tobytes() for part in others))
    return torch.cat([torch.get_rng_state(), torch.frombuffer(packed, dtype=torch.uint8)])


def go_on_with(packed: Tensor) -> None:
    """Let the random numbers be where they were when `packed_draws` was called, maybe on another rank."""
    n = len(torch.get_rng_state())
    torch.set_rng_state(packed[:n].clone())
    rest = packed[n:].numpy().tobytes()
    floats, numbers = np.frombuffer(rest[-16:], np.float64), np.frombuffer(rest[-48:-16], np.int64)
    words = np.frombuffer(rest[:-48], np.uint32)
    version, place, has_gauss, drawn = map(int, numbers)
    own = len(words) - 624
    state: Any = (version, tuple(map(int, words[:own])), float(floats[0]) if drawn else None)
    random.setstate(state)
    np.random.set_state(("MT19937", words[own:], place, has_gauss, float(floats[1])))


PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
"""What a block may return besides tensors."""
MOST = 64
"""Tensors that a block may return."""


class Messages:
    """Between the stages of one step; `wait` ends it.

    Args:
        mesh: The model axis.
        stages: Of the pipeline; stage s is on rank s mod the size of the axis.
        device: Of the run.
    """

    def __init__(self, mesh: DeviceMesh, stages: int, device: torch.device) -> None:
        self._group, self._ranks = mesh.get_group(), mesh.size()
        self._stages, self._device = stages, device
        # with what is sent, which has to stay until it is
        self._sent: list[tuple[Work | None, Tensor]] = []
        self._shared: list[tuple[Tensor, int]] = []

    def send_on(self, stage: int, micro_batch: int, result: Any) -> None:
        """Send what a stage's last block has returned, and the state of its random numbers, to the next stage."""
        head = torch.cat([packed_draws(), _print_of(result)])
        for i, tensor in enumerate([head, *_tensors(result)]):
            self._send(tensor.detach(), stage + 1, self._tag(stage, micro_batch, i))

    def receive(self, stage: int, micro_batch: int, placeholders: Any) -> tuple[Any, list[Tensor]]:
        """What the stage before sends; the random numbers go on as it left them.

        Returns:
            The same nesting as the placeholders with values, and those that may get gradients.

        Raises:
            InstallError: The stage before has other shapes than the placeholders.
        """
        draws, own_print = packed_draws(), _print_of(placeholders)
        head = torch.cat([draws, own_print])
        self._receive(head, stage - 1, self._tag(stage - 1, micro_batch, 0))
        go_on_with(head[: len(draws)])
        if not torch.equal(head[len(draws) :], own_print):
            shapes = [tuple(tensor.shape) for tensor in _tensors(placeholders)]
            raise InstallError(
                f"pipeline: the last block of stage {stage - 1!r} did not return tensors of the shapes {shapes!r},"
                " which follow from the shapes of its inputs; shapes and values that are not tensors must not"
                " depend on the values of tensors or on the step: leave 'pipeline' out"
            )
        flat, form = tree_flatten(placeholders)
        memory = Counter(value.untyped_storage()._cdata for value in flat if isinstance(value, Tensor))
        leaves, values, i = [], [], 0
        for value in flat:
            if isinstance(value, Tensor):
                i += 1
                shares = memory[value.untyped_storage()._cdata] > 1
                # with versions, in a validation too
                with torch.inference_mode(False):
                    own = torch.empty(value.shape, dtype=value.dtype, device=self._device)
                self._receive(own, stage - 1, self._tag(stage - 1, micro_batch, i))
                value = own
                if _has_gradients(own):
                    leaves.append(own)
                    # a block may write into what it is handed, which it may not into a leaf
                    value = own.requires_grad_().clone() if torch.is_grad_enabled() else own
                if shares:
                    self._shared.append((value, value._version))
            values.append(value)
        return tree_unflatten(values, form), leaves

    def refuse_written(self) -> None:
        """After a forward pass: refuse, with an InstallError, writes into one of received tensors that had one memory.

        The one was a view of the other, or both are one tensor, and a write into either is in both. Here it is not.
        """
        shared, self._shared = self._shared, []
        for value, version in shared:
            if value._version != version:
                raise InstallError(
                    "pipeline: the block before a stage returns several tensors in one memory, and the stage writes in"
                    f" place into that of shape {tuple(value.shape)!r}, which the others would not follow; let the"
                    " block return copies, or leave 'pipeline' out"
                )

    def send_back(self, stage: int, micro_batch: int, leaves: Sequence[Tensor]) -> None:
        """Send the gradients of what a stage has received, those that there are, to the stage before."""
        # a gradient of zeros in place of none would let an optimiser with weight decay move a parameter
        there = torch.tensor([leaf.grad is not None for leaf in leaves], dtype=torch.uint8)
        # Tag 0 is the list, so that the receiver knows which of the others will come: it waits for no gradient that is
        # not sent.
        for i, value in enumerate([there, *(leaf.grad for leaf in leaves)]):
            if value is not None and leaves:
                self._send(value, stage - 1, self._tag(self._stages + stage, micro_batch, i))

    def receive_back(self, stage: int, micro_batch: int, result: Any) -> tuple[list[Tensor], list[Tensor]]:
        """Those tensors of what a stage has returned that have gradients, and their gradients."""
        found = [tensor for tensor in _tensors(result) if _has_gradients(tensor)]
        there, outputs, grads = torch.empty(len(found), dtype=torch.uint8), [], []
        for i, tensor in enumerate([there, *found]):
            if not found or (i and not there[i - 1]):
                continue
            grad = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device) if i else there
            self._receive(grad, stage + 1, self._tag(self._stages + stage + 1, micro_batch, i))
            # Received in any case, or the message would be taken for that of the next step, which has the same tag. A
            # result that needs no gradient here (blocks under no_grad) was a leaf with one over there.
            if i and tensor.requires_grad:
                outputs.append(tensor)
                grads.append(grad)
        return outputs, grads

    def wait(self) -> None:
        """Until all that was sent has arrived."""
        while self._sent:
            work, _ = self._sent.pop()
            wait_until_sent(work)

    def _send(self, tensor: Tensor, stage: int, tag: int) -> None:
        tensor = _real(tensor.resolve_conj().contiguous())
        to = dist.get_global_rank(self._group, stage % self._ranks)
        self._sent.append((dist.isend(tensor, to, group=self._group, tag=tag), tensor))

    def _receive(self, tensor: Tensor, stage: int, tag: int) -> None:
        dist.recv(_real(tensor), dist.get_global_rank(self._group, stage % self._ranks), group=self._group, tag=tag)

    def _tag(self, stage: int, micro_batch: int, i: int) -> int:
        return (micro_batch * 2 * self._stages + stage) * MOST + i


def wait_until_sent(work: Work | None) -> None:
    """Wait for another stage to take what it was sent; by this function a rank is known to wait for others (faults)."""
    assert work is not None, "a rank of the group sends"
    work.wait()


def _has_gradients(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _real(tensor: Tensor) -> Tensor:
    """The same memory in a type that can be sent."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _print_of(result: Any) -> Tensor:
    """A digest of all that a receiver takes for granted, of one length."""
    leaves, form = tree_flatten(result)
    told = [(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else (type(leaf), leaf) for leaf in leaves]
    digest = hashlib.blake2b(repr((told, form)).encode(), digest_size=8).digest()
    return torch.frombuffer(bytearray(digest), dtype=torch.uint8)


def _tensors(result: Any) -> list[Tensor]:
    leaves = tree_leaves(result)
    found = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    strange = [leaf for leaf in leaves if not isinstance(leaf, (Tensor, *PLAIN))]
    if strange or len(found) >= MOST:
        raise InstallError(
            f"pipeline: a block returns {len(found)!r} tensors and"
            f" {sorted({type(leaf).__name__ for leaf in strange})!r}; allowed are fewer than {MOST!r} tensors,"
            " numbers and texts, in any nesting of tuples, lists and dictionaries: let blocks return these, or"
            " leave 'pipeline' out"
        )
    return found
