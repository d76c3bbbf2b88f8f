"""Send activations and random states forward between pipeline stages, and gradients back.

A receiver has placeholders of what it receives, so only values are sent, not shapes, and micro-batches may differ in
size. Sender and receiver compare a digest of shapes and plain values (`_print_of`): if a block's result has a shape, or
a number, that does not follow from its inputs, an error is raised. Every tensor of a micro-batch has a separate tag, so
that the order of messages does not matter. Before gradients, a list of which tensors have one is sent: a parameter
that no gradient reaches must have none, so that its optimiser skips it.

The random state of torch, NumPy and Python is sent with a micro-batch from stage to stage: random numbers depend on the
seed only, not on the number of stages or on the order of a rank's passes.

Known limits: separate generators of a module or a data set are not sent. NCCL ignores tags, and matches messages by
their order; that was not tried, and installing a pipeline refuses GPUs.
"""

import hashlib
import random
from collections import Counter, defaultdict
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
from lightning_amp.techniques.ranks.messages import receive, sendable


def seed_draws(seed: int) -> None:
    """Set the seed of torch, NumPy and Python."""
    # not torch.manual_seed, which records its stack for every unused kind of device: 3 ms per micro-batch
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def packed_draws() -> Tensor:
    """Return the random state of torch, NumPy and Python as bytes of constant length."""
    version, words, gauss = random.getstate()
    _, keys, place, has_gauss, cached = np.random.get_state(legacy=True)
    numbers = np.array([version, place, has_gauss, gauss is not None], np.int64)
    others = [np.array(words, np.uint32), np.asarray(keys), numbers, np.array([gauss or 0.0, cached])]
    packed = bytearray(b"".join(part.tobytes() for part in others))
    return torch.cat([torch.get_rng_state(), torch.frombuffer(packed, dtype=torch.uint8)])


def go_on_with(packed: Tensor) -> None:
    """Set the random state to a result of `packed_draws`, which may come from another rank."""
    n = len(torch.get_rng_state())
    torch.set_rng_state(packed[:n].clone())
    # as `packed_draws` has joined them: words, keys, then 4 int64 and 2 float64 (48 bytes)
    rest = packed[n:].numpy().tobytes()
    floats, numbers = np.frombuffer(rest[-16:], np.float64), np.frombuffer(rest[-48:-16], np.int64)
    words = np.frombuffer(rest[:-48], np.uint32)
    version, place, has_gauss, drawn = map(int, numbers)
    own = len(words) - 624
    state: Any = (version, tuple(map(int, words[:own])), float(floats[0]) if drawn else None)
    random.setstate(state)
    np.random.set_state(("MT19937", words[own:], place, has_gauss, float(floats[1])))


PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
"""Types that a block may return in addition to tensors."""
MOST = 64
"""One more than the most tensors that a block may return."""


class Messages:
    """Messages between the stages of one step; call `wait` at its end.

    Args:
        mesh: The model axis.
        stages: Number of stages of the pipeline; stage s is on rank s mod the size of the axis.
        device: Device of the run.
    """

    def __init__(self, mesh: DeviceMesh, stages: int, device: torch.device) -> None:
        self._group, self._ranks = mesh.get_group(), mesh.size()
        self._stages, self._device = stages, device
        # with the tensors, which must stay alive until they are sent; by stage (of gradients: behind all stages) and
        # micro-batch
        self._sent = defaultdict[tuple[int, int], list[tuple[Work | None, Tensor]]](list)
        self._shared: list[tuple[Tensor, int]] = []
        self._sent_back: dict[int, tuple[int, int]] = {}

    def send_on(self, stage: int, micro_batch: int, result: Any) -> None:
        """Send the result of a stage's last block, and the random state, to the next stage."""
        head = torch.cat([packed_draws(), _print_of(result)])
        for i, tensor in enumerate([head, *_tensors(result)]):
            self._send(tensor.detach(), stage + 1, (stage, micro_batch), i)

    def receive(self, stage: int, micro_batch: int, placeholders: Any) -> tuple[Any, list[Tensor]]:
        """Receive the result of the stage before, and continue with its random state.

        Returns:
            The nesting of the placeholders with values, and the leaves that may get gradients.

        Raises:
            InstallError: The stage before has other shapes than the placeholders.
        """
        own_print = _print_of(placeholders)
        head = torch.cat([packed_draws(), own_print])
        draws = len(head) - len(own_print)
        self._receive(head, stage - 1, self._tag(stage - 1, micro_batch, 0))
        go_on_with(head[:draws])
        if not torch.equal(head[draws:], own_print):
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
                # a normal tensor, which has a version, also in a validation under inference mode
                with torch.inference_mode(False):
                    own = torch.empty(value.shape, dtype=value.dtype, device=self._device)
                self._receive(own, stage - 1, self._tag(stage - 1, micro_batch, i))
                value = own
                if _has_gradients(own):
                    leaves.append(own)
                    # a copy, because a block may write into its input but not into a leaf
                    value = own.requires_grad_().clone() if torch.is_grad_enabled() else own
                if shares:
                    self._shared.append((value, value._version))
            values.append(value)
        return tree_unflatten(values, form), leaves

    def refuse_written(self) -> None:
        """Raise an InstallError if the forward pass has written into one of received tensors that shared memory.

        On the sender, one was a view of the other, or both were one tensor, so a write changed both. Here it does not.
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
        """Send the existing gradients of what a stage has received to the stage before.

        First wait until those of the micro-batch before have arrived, and free them: a stage is one micro-batch ahead
        of the stage before at most, which has its next gradients in any case.
        """
        if stage in self._sent_back:
            self._let_go(self._sent_back[stage])
        self._sent_back[stage] = key = self._stages + stage, micro_batch
        # with zeros instead of no gradient, an optimiser with weight decay would change a parameter
        there = torch.tensor([leaf.grad is not None for leaf in leaves], dtype=torch.uint8)
        # Tag 0 is the list of existing gradients, so that the receiver does not wait for a gradient that is not sent.
        for i, value in enumerate([there, *(leaf.grad for leaf in leaves)]):
            if value is not None and leaves:
                self._send(value, stage - 1, key, i)

    def receive_back(self, stage: int, micro_batch: int, result: Any) -> tuple[list[Tensor], list[Tensor]]:
        """Receive gradients of a stage's results; returns the results that have one, and these gradients."""
        found = [tensor for tensor in _tensors(result) if _has_gradients(tensor)]
        there, outputs, grads = torch.empty(len(found), dtype=torch.uint8), [], []
        for i, tensor in enumerate([there, *found]):
            if not found or (i and not there[i - 1]):
                continue
            grad = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device) if i else there
            self._receive(grad, stage + 1, self._tag(self._stages + stage + 1, micro_batch, i))
            # the next stage sends gradients of what it has received: nothing has to keep that any longer
            self._let_go((stage, micro_batch))
            # Received in any case: otherwise the next step, which has the same tag, would receive this message. A
            # result that needs no gradient here (blocks under no_grad) was a leaf with a gradient on the receiver.
            if i and tensor.requires_grad:
                outputs.append(tensor)
                grads.append(grad)
        return outputs, grads

    def wait(self) -> None:
        """Wait until all messages have arrived."""
        for key in [*self._sent]:
            self._let_go(key)

    def _let_go(self, key: tuple[int, int]) -> None:
        """Wait until the messages of a stage and micro-batch have arrived, and free them."""
        sent = self._sent.pop(key, [])
        while sent:
            wait_until_sent(sent.pop()[0])

    def _send(self, tensor: Tensor, stage: int, key: tuple[int, int], i: int) -> None:
        sent = sendable(_real(tensor.resolve_conj().contiguous()), self._group)
        work = dist.isend(sent, group=self._group, group_dst=stage % self._ranks, tag=self._tag(*key, i))
        self._sent[key].append((work, sent))

    def _receive(self, tensor: Tensor, stage: int, tag: int) -> None:
        receive(_real(tensor), self._group, stage % self._ranks, tag)

    def _tag(self, stage: int, micro_batch: int, i: int) -> int:
        return (micro_batch * 2 * self._stages + stage) * MOST + i


def wait_until_sent(work: Work | None) -> None:
    """Wait until another stage has received a message; fault detection recognizes waiting ranks by this function."""
    assert work is not None, "a rank of the group sends"
    work.wait()


def _has_gradients(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _real(tensor: Tensor) -> Tensor:
    """View complex tensors as real ones, which can be sent."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _print_of(result: Any) -> Tensor:
    """Return a digest, of constant length, of everything about a result that a receiver assumes."""
    leaves, form = tree_flatten(result)
    described = [(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else (type(leaf), leaf) for leaf in leaves]
    digest = hashlib.blake2b(repr((described, form)).encode(), digest_size=8).digest()
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
