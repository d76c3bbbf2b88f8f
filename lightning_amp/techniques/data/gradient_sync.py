"""Reduce gradients over the mesh after backward: average over the data axis, sum partial ones over the model axis.

    replicated p   grad(p) <- (1 / D) sum over data ranks d of grad_d(p)            equal in a model group
    sharded p      the same, for the rank's shard
    partial p      grad(p) <- (1 / D) sum over d and model ranks m of grad_dm(p)    each rank has a partial gradient

for every p that the backward pass of any rank of the mesh has reached. A rank that did not reach p contributes zero; a
p that no rank has reached keeps its gradient, or its None.

Averaging keeps equal tensors equal, so it is exact to reduce an accumulated sum once, or a gradient twice. A sum is
not: before a backward pass adds to a partial gradient that is already reduced, every rank scales it by 1 / M.

Collectives per reduction: one all-reduce of P bytes over all ranks (which parameters were reached), then one all-reduce
per bucket: over all ranks for partial gradients, over the data axis for replicated and for sharded ones. These kinds
have separate buckets, so that replicated gradients are summed in the same order on all ranks of a model group, whatever
the sizes of shards. Nothing is sent over an axis of one rank; without partial gradients only the first all-reduce
crosses the model axis. On a device with a varying order of summation, such as a GPU with atomic additions, copies of a
replicated parameter would drift apart: with `rounds_differently` their gradients are averaged over all ranks.

A bucket is reduced while the next one is filled. A gradient of `ALONE` bytes or more is a bucket without a copy; these
buckets go first, so that small gradients are copied meanwhile. A model has hundreds of parameters, and each access to
`.grad` creates a Python object: a reduction accesses each once.

On a DryMesh nothing is sent (sharding/splits.py). Other ranks are then taken to reach what this one does, and if that
is a partial parameter, all partial ones.

Legend: P parameters, D and M ranks of the data and the model axis.
Known limits: a user's tensor hook on a partial parameter receives the rank's partial gradient; parameters added to the
module later are not averaged, and a fit refuses to train them; all gradients must lie on one device.
"""

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, ReduceOp, all_reduce, get_world_size, group
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from lightning_amp._torch import copy_each, flatten_each, unflatten_like
from lightning_amp.errors import InstallError
from lightning_amp.sharding.splits import DryMesh, record_dry
from lightning_amp.techniques.ranks.collectives import wait_in_all_reduce

MIB = 2**20
ALONE = MIB
IN_FLIGHT = 2
"""Buckets that are reduced at a time, which bounds their memory."""
REACHED, SPARSE = 1, 2
"""Status of a parameter on a rank; the largest value of all ranks counts."""


def gradient_sizes(parameters: Iterable[nn.Parameter]) -> tuple[int, ...]:
    """Bytes of the gradient of every parameter, without those of 0 dimensions."""
    return tuple(p.numel() * p.element_size() for p in parameters if p.requires_grad and p.dim())


def zeros_for_parts(partial: Sequence[str], module: nn.Module) -> Callable[[], None]:
    """Return what gives partial parameters that a rank did not reach its part of their gradients: zeros."""

    def add() -> None:
        for parameter in map(module.get_parameter, partial):
            if parameter.grad is None and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)

    return add


class GradientSync:
    """Track which gradients have changed since the last reduction, and reduce these.

    Attributes:
        blocked: While true, `reduce` does nothing and the changed gradients stay pending; for gradient accumulation.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        mesh: DeviceMesh | DryMesh,
        *,
        partial: Iterable[nn.Parameter] = (),
        sharded: Iterable[nn.Parameter] = (),
        bucket_bytes: int = 25 * MIB,
        rounds_differently: bool = False,
        model_ranks_differ: bool = False,
    ) -> None:
        """Register the parameters.

        Args:
            parameters: In the same order on every rank; duplicates are ignored.
            mesh: All ranks, with the axes "data" and "model".
            partial: Parameters of which a rank of the model axis computes a partial gradient.
            sharded: Parameters that are a rank's shard; their shapes may differ over the model axis.
            bucket_bytes: Largest flat buffer; a larger gradient is a bucket without a copy.
            rounds_differently: Whether replicated gradients may differ in rounding within a model group.
            model_ranks_differ: Whether ranks of a model group have different parameters, so that nothing is exchanged
                between them.
        """
        self.blocked = False
        self._parameters = list({id(p): p for p in parameters}.values())
        self._partial, self._sharded = self._places(partial), self._places(sharded)
        assert not self._partial & self._sharded, "a shard's gradient is whole"
        # groups are read from the axes when needed: a mesh can be deep-copied, a group cannot; mesh["data"] takes long
        self._data, self._model = mesh["data"], mesh["model"]
        self._dry = isinstance(mesh, DryMesh)
        self._data_ranks, self._model_ranks = self._data.size(), 1 if model_ranks_differ else self._model.size()
        self._bucket_bytes = bucket_bytes
        self._copies = self._model_ranks if rounds_differently else 1
        self._sizes = [(p.dtype, p.nbytes) for p in self._parameters]
        self._reached: set[int] = set()
        self._hooks: dict[int, list[RemovableHandle]] = {}

    @property
    def pending(self) -> bool:
        """Whether this rank holds gradients that are not reduced yet; other ranks may differ."""
        return any(self._parameters[i].grad is not None for i in self._reached)

    @property
    def _sends(self) -> bool:
        """Whether gradients differ between ranks at all."""
        crosses_model = self._model_ranks > 1 and (bool(self._partial) or self._copies > 1)
        return bool(self._parameters) and (self._data_ranks > 1 or crosses_model)

    @property
    def _everyone(self) -> ProcessGroup | None:
        """Process group of all ranks of the mesh; None in a dry run."""
        if self._model_ranks == 1 or self._dry:
            return self._data.get_group()
        if self._data_ranks == 1:
            return self._model.get_group()
        assert self._data_ranks * self._model_ranks == get_world_size(), "a mesh covers all ranks of the run"
        whole = group.WORLD
        assert whole is not None, "a mesh has connected processes"
        return whole

    def watch(self) -> None:
        """Register hooks on parameters that require gradients; call it before every backward, for unfreezing."""
        if not self._sends:
            return
        for i, parameter in enumerate(self._parameters):
            if i not in self._hooks and parameter.requires_grad:
                mark = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    functools.partial(self._mark, i)
                )
                self._hooks[i] = [mark]
                if i in self._partial and self._model_ranks > 1:
                    before = functools.partial(self._keep_part, i)
                    self._hooks[i].append(parameter.register_hook(before))  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        """Remove the hooks."""
        for hooks in self._hooks.values():
            for hook in hooks:
                hook.remove()
        self._hooks.clear()
        self._reached.clear()

    @torch.no_grad()
    def reduce(self, *, force: bool = False) -> None:
        """Reduce gradients that have changed on any rank; a collective that every rank must call.

        Args:
            force: Reduce also while `blocked`.

        Raises:
            InstallError: A rank holds a gradient that is not a dense tensor; raised on every rank.
        """
        if self.blocked and not force:
            return
        if not self._sends:
            self._reached.clear()
            return
        grads = {i: grad for i in self._reached if (grad := self._parameters[i].grad) is not None}
        reached = self._agree(grads)
        others, everyone = self._partial | self._sharded, self._data_ranks * self._model_ranks
        # in this order on every rank, because collectives are matched by their order
        kinds = (
            ([i for i in reached if i in self._partial], True, 1),
            ([i for i in reached if i not in others], self._copies > 1, self._copies),
            ([i for i in reached if i in self._sharded], False, 1),
        )
        for indices, over_model, copies in kinds:
            if (everyone if over_model else self._data_ranks) == 1:
                continue
            ranks = self._everyone if over_model else self._data.get_group()
            travelling: deque[Callable[[], None]] = deque()
            for bucket in self._buckets(indices):
                if len(travelling) == IN_FLIGHT:
                    travelling.popleft()()
                travelling.append(self._send([self._gradient(i, grads) for i in bucket], ranks, copies))
            # the last bucket of one kind is freed before the first of the next
            while travelling:
                travelling.popleft()()
        self._reached.clear()

    def reduce_rest(self) -> None:
        """Reduce pending gradients, also while `blocked`; if no rank has any, a collective of one byte."""
        left = self.pending
        if self._sends:
            box = torch.tensor(left, dtype=torch.uint8, device=self._parameters[0].device)
            all_reduce(box, ReduceOp.MAX, group=self._everyone)
            left = bool(box)
        if left:
            self.reduce(force=True)
        self._reached.clear()

    def _places(self, some: Iterable[nn.Parameter]) -> set[int]:
        place = {id(p): i for i, p in enumerate(self._parameters)}
        ids = {id(p) for p in some}
        assert ids <= place.keys(), "what is reduced in its own way is one of the parameters"
        return {place[i] for i in ids}

    def _mark(self, index: int, parameter: Tensor) -> None:
        self._reached.add(index)

    def _keep_part(self, index: int, incoming: Tensor) -> None:
        """Scale a reduced gradient by 1 / M before a backward pass adds a partial gradient to it."""
        grad = self._parameters[index].grad
        # the reduction will sum the M equal copies: M times 1 / M of each
        if index not in self._reached and grad is not None:
            with torch.no_grad():
                grad.div_(self._model_ranks)

    def _agree(self, grads: Mapping[int, Tensor]) -> list[int]:
        """Return the parameters that any rank has reached, the same list on every rank.

        `grads` are those of this rank. A gradient that was reset to None after backward is not among them, and must not
        come back as zeros: optimisers skip None.
        """
        if self._dry:
            record_dry(self._data, "all_reduce", len(self._parameters))
            return sorted(grads.keys() | (self._partial if grads.keys() & self._partial else set()))
        # one byte per parameter, combined by the maximum: which parameters are reached may depend on the data, and
        # ranks with different lists of collectives would deadlock
        words = bytearray(len(self._parameters))
        for i, grad in grads.items():
            words[i] = REACHED if grad.layout is torch.strided else SPARSE
        # a copy: memory that Python owns may be freed by any thread that holds it last
        union = torch.frombuffer(words, dtype=torch.uint8).to(self._parameters[0].device, copy=True)
        all_reduce(union, ReduceOp.MAX, group=self._everyone)
        found = union.tolist()
        if SPARSE in found:
            shape = tuple(self._parameters[found.index(SPARSE)].shape)
            raise InstallError(
                f"dense gradients can be averaged over ranks; the parameter of shape {shape!r} has a sparse"
                " one. Make its layer dense, for an embedding with sparse=False"
            )
        return [i for i, word in enumerate(found) if word]

    def _buckets(self, indices: list[int]) -> Iterator[list[int]]:
        """Yield each large gradient as one bucket, then buckets of gradients of one dtype up to the bucket size."""
        alone = min(ALONE, self._bucket_bytes)
        small: dict[torch.dtype, list[int]] = {}
        for i in indices:
            dtype, n_bytes = self._sizes[i]
            if n_bytes >= alone:
                yield [i]
            else:
                small.setdefault(dtype, []).append(i)
        for same_type in small.values():
            bucket: list[int] = []
            filled = 0
            for i in same_type:
                n_bytes = self._sizes[i][1]
                if bucket and filled + n_bytes > self._bucket_bytes:
                    yield bucket
                    bucket, filled = [], 0
                bucket.append(i)
                filled += n_bytes
            yield bucket

    def _send(self, bucket: list[Tensor], ranks: ProcessGroup | None, copies: int) -> Callable[[], None]:
        """Start to average a bucket over ranks; returns a function that waits and writes the result back."""
        alone = len(bucket) == 1 and bucket[0].is_contiguous()
        flat = bucket[0] if alone else flatten_each(bucket)
        # divided before the sum, as torch's own reducer does: half precision sums could overflow
        flat.div_(self._data_ranks * copies)
        work = None if self._dry else all_reduce(flat, group=ranks, async_op=True)
        record_dry(self._data, "all_reduce", flat.nbytes)

        def arrive() -> None:
            if not self._dry:
                wait_in_all_reduce(work)
            if not alone:
                # one operator for all, because each has a launch cost
                copy_each(bucket, unflatten_like(flat, bucket))

        return arrive

    def _gradient(self, index: int, grads: Mapping[int, Tensor]) -> Tensor:
        if index in grads:
            return grads[index]
        parameter = self._parameters[index]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        elif index in self._partial and index not in self._reached:
            # already reduced, and not reached on this rank, while others add partial gradients: as in `_keep_part`
            parameter.grad.div_(self._model_ranks)
        return parameter.grad
