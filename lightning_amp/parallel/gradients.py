"""S1: average the gradients over the data axis after backward, whatever each rank's loss made use of.

    grad(p) <- (1 / R) sum over ranks r of grad_r(p)        for every p that any rank's backward has reached

A rank that did not reach p contributes zero; a p that no rank has reached keeps its gradient, or its None.
The average is linear and leaves equal tensors equal, so reducing an accumulated sum once, or a gradient
twice, is exact.

Collectives per reduction: one all-reduce of P bytes (which parameters), then one all-reduce per bucket.
Legend: P parameters, R ranks of the data axis.
Known limits: parameters added to the module later are not seen; all gradients lie on one device.
"""

from collections.abc import Iterable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, ReduceOp, all_reduce, get_world_size
from torch.utils.hooks import RemovableHandle

from lightning_amp.errors import InstallError

MIB = 2**20
REACHED, SPARSE = 1, 2
"""What a rank says of a parameter; the largest word of all ranks counts."""


class GradientSync:
    """Knows which gradients have changed since the last reduction, and reduces those.

    Attributes:
        blocked: While true `reduce` does nothing and the changed gradients stay known; for accumulation.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], group: ProcessGroup, *, bucket_bytes: int = 25 * MIB
    ) -> None:
        """Watch parameters.

        Args:
            parameters: In the same order on every rank; a parameter given twice counts once.
            group: Ranks of the data axis.
            bucket_bytes: Largest flat buffer; a gradient that is larger travels alone and is not copied.
        """
        self.blocked = False
        self._parameters = list({id(p): p for p in parameters}.values())
        self._group = group
        self._bucket_bytes = bucket_bytes
        self._reached: set[int] = set()
        self._hooks: dict[int, RemovableHandle] = {}

    @property
    def pending(self) -> bool:
        """Whether this rank holds gradients that were not reduced yet; other ranks may differ."""
        return any(self._parameters[i].grad is not None for i in self._reached)

    def watch(self) -> None:
        """Hook the parameters that need gradients by now; call it before every backward, for unfreezing."""
        for i, parameter in enumerate(self._parameters):
            if parameter.requires_grad and i not in self._hooks:
                self._hooks[i] = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    partial(self._mark, i)
                )

    def remove(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self._reached.clear()

    @torch.no_grad()
    def reduce(self, *, force: bool = False) -> None:
        """Average what has changed on any rank; a collective, every rank must call it.

        Args:
            force: Also while `blocked`.

        Raises:
            InstallError: A rank holds a gradient that is not a dense tensor; raised on every rank.
        """
        if self.blocked and not force:
            return
        if self._parameters and get_world_size(self._group) > 1:
            for bucket in self._buckets(self._agree()):
                self._average(bucket)
        self._reached.clear()

    def _mark(self, index: int, parameter: Tensor) -> None:
        self._reached.add(index)

    def _word(self, index: int) -> int:
        grad = self._parameters[index].grad
        # a gradient that was reset to None after backward must not come back as zeros: optimisers skip None
        if index not in self._reached or grad is None:
            return 0
        return REACHED if grad.layout is torch.strided else SPARSE

    def _agree(self) -> list[nn.Parameter]:
        """The parameters that any rank has reached, the same list on every rank."""
        words = [self._word(i) for i in range(len(self._parameters))]
        union = torch.tensor(words, dtype=torch.uint8, device=self._parameters[0].device)
        all_reduce(union, ReduceOp.MAX, group=self._group)
        words = union.tolist()
        if SPARSE in words:
            shape = tuple(self._parameters[words.index(SPARSE)].shape)
            raise InstallError(
                f"dense gradients can be averaged over ranks; the parameter of shape {shape!r} has a sparse"
                " one. Make its layer dense, for an embedding with sparse=False"
            )
        return [p for p, word in zip(self._parameters, words, strict=True) if word]

    def _buckets(self, parameters: list[nn.Parameter]) -> Iterator[list[Tensor]]:
        """Gradients of one type, up to the bucket size together."""
        for dtype in dict.fromkeys(p.dtype for p in parameters):
            bucket: list[Tensor] = []
            n_bytes = 0
            for grad in (_gradient(p) for p in parameters if p.dtype is dtype):
                if bucket and n_bytes + grad.nbytes > self._bucket_bytes:
                    yield bucket
                    bucket, n_bytes = [], 0
                bucket.append(grad)
                n_bytes += grad.nbytes
            yield bucket

    def _average(self, bucket: list[Tensor]) -> None:
        alone = len(bucket) == 1 and bucket[0].is_contiguous()
        flat = bucket[0] if alone else torch.cat([grad.reshape(-1) for grad in bucket])
        # divided before the sum, as torch's own reducer does: half precision sums could overflow
        flat.div_(get_world_size(self._group))
        all_reduce(flat, group=self._group)
        if not alone:
            pieces = torch.split(flat, [grad.numel() for grad in bucket])
            for grad, piece in zip(bucket, pieces, strict=True):
                grad.copy_(piece.view(grad.shape))


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
