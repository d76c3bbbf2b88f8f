"""Keep parameters of a pipeline on the ranks whose stages use them; full in checkpoints and after the run.

A parameter of the blocks is on the ranks of these blocks, and on the last stage's rank if the step reads it after all
blocks too (`shared`, as the plan has counted). For parameters outside the blocks, or of a module that is
both inside and outside, the stages that use them are not known in advance: all ranks have them until the first backward
pass that reaches them, and afterwards only the ranks on which it did.
On other ranks the module has a placeholder on the device "meta", without gradient and optimiser state. The original
object, emptied, is kept for the end of the run. A parameter on several ranks, such as a tied head, gets the sum of
their gradients, added in rank order by one rank and sent back, so that all have the same bits.

    norm         |g|^2 = sum over parameters |g|^2, each counted by the first rank that has it

Collectives: per step, an all-gather of one byte for every parameter that several ranks have, and two messages for the
gradient of each; per checkpoint, a broadcast of every parameter and of every tensor of the optimiser's state.

Known limits: all ranks have the complete module until the pipeline is installed, and all buffers. If another stage
reaches a parameter outside the blocks later in the run, the parameter is no longer there, and the step raises an error.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_amp.errors import InstallError
from lightning_amp.lightning.checkpoints.probe_optimizer import mixes, mixes_parameters
from lightning_amp.lightning.checkpoints.read_directory import replaced
from lightning_amp.lightning.checkpoints.shards import Shards, numbered
from lightning_amp.lightning.checkpoints.write_checkpoint import Form, kept
from lightning_amp.techniques.ranks.messages import receive, sendable
from lightning_amp.techniques.ranks.placeholders import AbsentParameter, absent_parameter
from lightning_amp.techniques.table import STAGED


@dataclass(eq=False)
class Held:
    """A parameter, and the ranks that have it."""

    whole: nn.Parameter  # the module's object, which is in the optimisers of ranks that have it
    mesh: DeviceMesh  # the model axis
    absent: AbsentParameter = field(init=False)  # placeholder on other ranks
    places: list[tuple[nn.Module, str]] = field(default_factory=list)  # modules that have it, and its names there
    ranks: tuple[int, ...] | None = None  # ranks of the model axis that have it; None if all do
    here: bool = True  # whether this rank has it
    technique: ClassVar[str] = STAGED

    def __post_init__(self) -> None:
        self.absent = absent_parameter(self.whole)

    @property
    def shape(self) -> torch.Size:
        """Shape of the full parameter."""
        return self.absent.shape

    @property
    def trained(self) -> bool:
        """Whether other ranks may have trained values that this rank does not have."""
        return not self.here

    def free(self) -> None:
        """Free the memory on a rank that does not use it."""
        self.here = False
        self.absent.requires_grad_(self.whole.requires_grad)
        self.whole.data, self.whole.grad = self.whole.data.new_empty(0), None
        self._put(self.absent)

    def join(self, value: Tensor) -> Tensor:
        """Broadcast the values of the first rank that has it; no collective if all ranks have them, as `value`."""
        if self.ranks is None:
            return value
        own = self.whole if self.here else torch.empty_like(self.absent, device=self.whole.device)
        return broadcast(own, self.ranks[0], self.mesh)

    def restore(self) -> None:
        """Restore the parameter on all ranks; a collective."""
        values = self.join(self.whole)
        if not self.here:
            self._have(values.to(self.whole.device))

    def restore_own(self) -> None:
        """Restore the parameter without values, as nan; no collective."""
        self._have(torch.full(self.shape, torch.nan, dtype=self.whole.dtype, device=self.whole.device))

    def _have(self, values: Tensor) -> None:
        self.here = True
        self.whole.data = values
        self.whole.requires_grad_(self.absent.requires_grad)
        self._put(self.whole)

    def _put(self, parameter: nn.Parameter) -> None:
        for module, name in self.places:
            module._parameters[name] = parameter


class StageParameters(Shards):
    """The parameters of a module whose blocks are stages; frees those of other ranks.

    Args:
        blocks: Pairs of a block and its rank of the model axis.
        mesh: Mesh with the axes "data" and "model".
        shared: Names of parameters of blocks that another rank holds too, and that rank.

    Attributes:
        all_ranks_raise: Whether all ranks of a pipeline raise the same error, and can still restore parameters.
    """

    model_ranks_differ = True
    all_ranks_raise = False

    def __init__(
        self,
        module: nn.Module,
        blocks: Sequence[tuple[nn.Module, int]],
        mesh: DeviceMesh,
        shared: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        super().__init__(module)
        self._mesh, self._model = mesh, mesh["model"]
        self._rank = self._model.get_local_rank()
        self._optimizers: list[Optimizer] = []
        self._owners = _owners(module, {id(block): rank for block, rank in blocks})
        found: dict[int, Held] = {}
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    found.setdefault(id(parameter), Held(parameter, self._model)).places.append((part, name))
        self.held = list(found.values())
        more = {id(module.get_parameter(name)): rank for name, rank in shared.items()}
        for held in self.held:
            ranks = set[int | None]().union(*(self._owners[id(part)] for part, _ in held.places))
            ranks |= {more[id(held.whole)]} if id(held.whole) in more else set()
            held.ranks = None if None in ranks else tuple(sorted(rank for rank in ranks if rank is not None))
            if held.ranks is not None and self._rank not in held.ranks:
                held.free()

    @property
    def here(self) -> list[nn.Parameter]:
        """Parameters that this rank has."""
        return [held.whole for held in self.held if held.here]

    # --- a step ---

    def settle(self) -> None:
        """Decide which ranks keep newly reached parameters, and sum gradients of several ranks; a collective."""
        shared = [held for held in self.held if held.ranks is None or len(held.ranks) > 1]
        if not shared:
            return
        reached_here = [held.here and held.whole.grad is not None for held in shared]
        mine = torch.tensor(reached_here, dtype=torch.uint8, device=self._mesh.device_type)
        everyones = [torch.empty_like(mine) for _ in range(self._mesh.size())]
        dist.all_gather(everyones, mine)
        # ranks are row-major in (data, model): the ranks of one stage have the same remainder
        n = self._model.size()
        # reached by any pipeline: gradients are averaged over a stage's data ranks, which must have the same parameters
        reached = [torch.stack(everyones[rank::n]).amax(0).tolist() for rank in range(n)]
        for i, held in enumerate(shared):
            users = tuple(rank for rank in range(n) if reached[rank][i])
            if held.ranks is None and users:
                held.ranks = users
                if self._rank not in users:
                    # after a resume, the optimiser has loaded state for it
                    for optimizer in self._optimizers:
                        optimizer.state.pop(held.whole, None)
                    held.free()
            # over all ranks that have it, not only those that reached it in this step, so that their copies stay equal
            if held.ranks is not None and len(held.ranks) > 1 and users and self._rank in held.ranks:
                self._sum(held, held.ranks, tag=i)

    def _sum(self, held: Held, ranks: tuple[int, ...], *, tag: int) -> None:
        group = self._model.get_group()
        first, *others = ranks
        own = held.whole
        # assigned, because the sum is received into this tensor
        own.grad = grad = torch.zeros_like(own) if own.grad is None else own.grad.contiguous()
        # the first rank adds in rank order and sends the sum back, so that all have the same bits
        if self._rank != first:
            dist.send(sendable(grad, group), group=group, group_dst=first, tag=tag)
            receive(grad, group, first, tag)
            return
        theirs = torch.empty_like(grad)
        for other in others:
            receive(theirs, group, other, tag)
            grad += theirs
        total = sendable(grad, group)
        for other in others:
            dist.send(total, group=group, group_dst=other, tag=tag)

    def _check_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Raise for optimisers whose update depends on several parameters."""
        self._optimizers = list(optimizers)
        for optimizer in optimizers:
            if mixes(optimizer, ("LBFGS",), mixes_parameters, "parameter", STAGED):
                raise InstallError(
                    f"the optimizer {type(optimizer).__name__!r} is not supported: its step depends on all parameters,"
                    " and a rank of a pipeline has those of its stage; use an optimizer that updates each parameter"
                    f" separately (Adam, SGD), or leave {STAGED!r} out"
                )

    def _gradients(self, among: Sequence[Held]) -> list[Tensor]:
        """Return gradients, each only on the first rank that has the parameter."""
        counted = [held.whole.grad for held in among if self._rank == (held.ranks[0] if held.ranks else 0)]
        return [grad for grad in counted if grad is not None]

    # --- state ---

    def give_back(self, optimizers: Sequence[Optimizer], *, complete: bool) -> None:
        """Restore full parameters, also after an error that all ranks have raised together."""
        super().give_back(optimizers, complete=complete or self.all_ranks_raise)

    def saved_state(self, state: dict[str, Any], form: Form) -> dict[str, Any]:
        """Return the module's state with the tensors of all ranks; a collective."""
        whole = super().saved_state(state, form)
        for name, (buffer, rank) in self._buffers().items():
            if name in whole:
                whole[name] = kept(broadcast(buffer, rank, self._model), form)
        return whole

    def _full(self, gradients: dict[str, Tensor], module: nn.Module) -> dict[str, Tensor]:
        everyones: list[Any] = [None] * self._model.size()
        # a rank has no gradients of other stages' parameters, and all ranks have to join in the same broadcasts
        dist.all_gather_object(everyones, list(gradients), group=self._model.get_group())
        first = {name: rank for rank in reversed(range(len(everyones))) for name in everyones[rank]}
        found, device = dict[str, Tensor](), self._model.device_type
        for name, parameter in module.named_parameters():
            if name in first:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                found[name] = broadcast(gradients.get(name, empty), first[name], self._model)
        return found

    def _held(self) -> dict[int, Held]:
        return {id(parameter): held for held in self.held for parameter in (held.whole, held.absent)}

    def _own(self, one: Held, value: Any, name: str) -> Any:
        return value if one.here else one.absent

    def _own_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        held = self._held()
        away = {i for p, i in numbered(optimizer, state) if id(p) in held and not held[id(p)].here}
        if not away:
            return dict(state)
        return {**state, "state": {i: values for i, values in state["state"].items() if i not in away}}

    def _buffers(self) -> dict[str, tuple[Tensor, int]]:
        owners = {at: self._owners[id(part)] for at, part in self._module.named_modules()}
        return {
            f"{at}.{name}": (buffer, rank)
            for at, part in self._module.named_modules()
            if len(owners[at]) == 1
            for rank in owners[at]
            if rank is not None
            for name, buffer in part.named_buffers(recurse=False)
        }

    def saved_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any], form: Form) -> dict[str, Any]:
        """Return an optimiser's state with the parameters of all ranks; a collective."""
        everyones: list[Any] = [None] * self._model.size()
        # shapes first, then one tensor at a time: no rank has a second copy of all
        shapes = replaced(state["state"], lambda _, v: v.detach().to("meta") if isinstance(v, Tensor) else v)
        dist.all_gather_object(everyones, shapes, group=self._model.get_group())
        owners = {key: 0 for key in everyones[0] if not isinstance(key, int)}
        of_parameter = self._held()
        for parameter, index in numbered(optimizer, state):
            held = of_parameter.get(id(parameter))
            rank = held.ranks[0] if held is not None and held.ranks else 0
            if index in everyones[rank]:
                owners[index] = rank
        merged = {
            key: self._collected(everyones[rank][key], state["state"].get(key), rank, form)
            for key, rank in owners.items()
        }
        return {**state, "state": merged}

    def _collected(self, shapes: Any, own: Any, rank: int, form: Form) -> Any:
        """Return a rank's values, of which others have the shapes, on "meta"; a collective."""
        here: list[Tensor] = []
        replaced(own, lambda _, value: here.append(value) if isinstance(value, Tensor) else None)
        values = iter(here)

        def value_of(_: str, like: Any) -> Any:
            if not isinstance(like, Tensor):
                return like
            value = next(values) if rank == self._rank else torch.empty_like(like, device=self._model.device_type)
            return kept(broadcast(value, rank, self._model), form)

        return replaced(shapes, value_of)


def broadcast(value: Tensor, rank: int, mesh: DeviceMesh) -> Tensor:
    """Broadcast the values of one rank of a mesh axis to host memory; a collective."""
    value = value.detach().to(mesh.device_type, copy=True, memory_format=torch.contiguous_format)
    # as bytes: gloo sends no int16 and no float8
    dist.broadcast(value.reshape(-1).view(torch.uint8), group=mesh.get_group(), group_src=rank)
    return value.cpu()


def _owners(module: nn.Module, ranks: Mapping[int, int]) -> dict[int, set[int | None]]:
    """Return for each module, by id, the ranks of its blocks; with None if it is outside the blocks too."""
    found: dict[int, set[int | None]] = {}

    def walk(part: nn.Module, rank: int | None) -> None:
        rank = ranks.get(id(part), rank)
        # a module with several parents is visited once for each rank
        if rank in found.setdefault(id(part), set()):
            return
        found[id(part)].add(rank)
        for child in part.children():
            walk(child, rank)

    walk(module, None)
    return found
