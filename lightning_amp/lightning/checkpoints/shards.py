"""Sharded parameters in one run: whole in checkpoints, one norm in clipping, whole again afterwards.

Without sharded parameters everything here hands on what it was given, and nothing communicates.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_amp.errors import PlanError
from lightning_amp.lightning.checkpoints import sharded_state
from lightning_amp.lightning.checkpoints.read_directory import fill
from lightning_amp.parallel.contract.sharded_parameter import ShardedParameter
from lightning_amp.parallel.ranks.check_region import check_region


class Shards:
    """The sharded parameters of a module, while they are installed.

    Attributes:
        sharded: Those that were replaced by this rank's shard.
        partial: Whole ones of which a rank's gradient is a part.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        sharded: Sequence[ShardedParameter] = (),
        partial: Sequence[nn.Parameter] = (),
    ) -> None:
        """Free the devices of the whole parameters.

        Args:
            module: The whole module; needed where there are shards.
            sharded: What was installed in it.
            partial: The parameters of which a rank's gradient is a part.
        """
        self.sharded, self.partial = tuple(sharded), tuple(partial)
        self._module = module if module is not None else nn.Module()
        for parameter in self.sharded:
            parameter.offload()

    def check(self, loss: Tensor) -> None:
        """Refuse a loss that reads one of them where it must not.

        Raises:
            InstallError: See `check_region`.
        """
        check_region(loss, self._module, partial=self.partial, sharded=self.sharded)

    def refuse_backward(self) -> None:
        """Refuse a backward that nobody completes, outside of a fit.

        Raises:
            PlanError: A gradient lies on several ranks.
        """
        if self.partial or self.sharded:
            raise PlanError(
                "manual_backward was called outside of a fit, and the plan leaves parts of the gradients on other ranks"
                " of the model axis, which are put together in a fit alone; use model_parallel_size=1 for this run"
            )

    def saved_state(self, state: dict[str, Any], *, in_parts: bool) -> dict[str, Any]:
        """The module's state with whole parameters, a collective, or with this rank's parts of them."""
        convert = sharded_state.part_state if in_parts else sharded_state.whole_state
        return convert(self._module, state, self.sharded) if self.sharded else state

    def own_state(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """A state with whole parameters as this rank loads it."""
        return sharded_state.own_state(self._module, state, self.sharded) if self.sharded else state

    def saved_optimizer_state(
        self, optimizer: Optimizer, state: dict[str, Any], *, in_parts: bool
    ) -> dict[str, Any]:
        """An optimiser's state as for whole parameters, a collective, or this rank's parts of it."""
        convert = sharded_state.part_optimizer_state if in_parts else sharded_state.whole_optimizer_state
        return convert(_plain(optimizer), state, self.sharded) if self.sharded else state

    def own_optimizer_states(
        self, optimizers: Sequence[Optimizer], states: Sequence[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """The optimisers' states for whole parameters as this rank loads them; what is still in shards is read."""
        if not self.sharded:
            return [fill(state) for state in states]
        pairs = zip(optimizers, states, strict=False)
        return [fill(sharded_state.own_optimizer_state(_plain(o), s, self.sharded)) for o, s in pairs]

    def watch(self, trainer: Trainer) -> Callable[[], None]:
        """Let clipping by norm see the shards of all ranks.

        Args:
            trainer: With the optimisers of the run, before its first step.

        Returns:
            A function that gives the precision plugin its own clipping back.

        Raises:
            InstallError: An optimiser whose update of one entry reads others.
        """
        if not self.sharded:
            return lambda: None
        sharded_state.check_optimizers(trainer.optimizers, self.sharded)
        plugin: Any = trainer.precision_plugin

        def clip(optimizer: Optimizer, clip_val: int | float) -> None:
            sharded_state.clip_norm(plugin.main_params(optimizer), clip_val, self.sharded)

        # on the instance: clipping belongs to the plugin, which the user may have chosen
        plugin.clip_grad_by_norm = clip
        return lambda: vars(plugin).pop("clip_grad_by_norm", None)

    def gradient_norm(self) -> Tensor:
        """Norm of the module's gradients with every rank's shards; a collective where some are sharded."""
        return sharded_state.gradient_norm(self._module.parameters(), self.sharded)

    def give_back(self, optimizers: Sequence[Optimizer], *, complete: bool) -> None:
        """Make the parameters whole at the end of a run, in the optimisers too.

        Args:
            optimizers: Those of the run.
            complete: Whether all ranks are there; then it is a collective, else other ranks' values are lost.
        """
        if not self.sharded:
            return
        whole = {id(parameter.shard): parameter.whole for parameter in self.sharded}
        held = [o for o in optimizers if any(id(p) in whole for g in o.param_groups for p in g["params"])]
        states = (
            [self.saved_optimizer_state(o, o.state_dict(), in_parts=False) for o in held] if complete else []
        )
        sharded_state.restore(self.sharded, complete=complete)
        for optimizer, state in zip(held, states, strict=False):
            for group in optimizer.param_groups:
                group["params"] = [whole.get(id(p), p) for p in group["params"]]
            optimizer.load_state_dict(state)


def _plain(optimizer: Any) -> Optimizer:
    """The optimiser inside of Lightning's."""
    plain: Optimizer = getattr(optimizer, "optimizer", optimizer)
    return plain
