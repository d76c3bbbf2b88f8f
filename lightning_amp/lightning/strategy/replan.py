"""A plan that is made anew when a decoder is given another number of anchors than its features have.

In `setup`, where a plan is made because optimisers do not exist yet, nothing tells how many rows the v of a foreign
decoder will have (adapters/adapt.py); its features' anchors are the least. When it is called for the first time with
others, and before it computes anything, the plan is made anew for them, and what it installs in the decoder takes the
place of what was there. What loaders, gradients and optimisers know of the ranks' parts by then cannot change any more:
where the new plan would split something in another way, the old choices stay, with the prediction for the rows that
there are, and the plan says so.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from lightning_amp.lightning.strategy.cells_per_step import UNKNOWN
from lightning_amp.lightning.strategy.plan_run import announce, plan_in_force
from lightning_amp.lightning.strategy.refusals import check_compiled, check_precision
from lightning_amp.parallel.install import Installed, install, lies_in
from lightning_amp.planning.plan.plan import Plan

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_amp.adapters.adapt import Adapted
    from lightning_amp.lightning.strategy.strategy import AMPStrategy


class Planned:
    """What is installed in a module, and its renewal.

    Args:
        strategy: With the user's wishes and the plan in force.
        trainer: Of the run.
        foreign: The decoders that ours stand in for.
    """

    def __init__(self, strategy: "AMPStrategy", trainer: "pl.Trainer", foreign: "Adapted") -> None:
        self._strategy, self._trainer, self._foreign = strategy, trainer, foreign
        self._installed = Installed()

    def install(self, plan: Plan) -> Installed:
        """Carry out a plan."""
        self._installed = self._made(plan)
        self._foreign.keep(swap.fqn for swap in self._installed.swaps)
        check_precision(self._installed, self._strategy.precision_plugin)
        return self._installed

    def undo(self) -> None:
        """Put the modules back that were there before."""
        self._installed.undo()

    def again(self, rows: str) -> None:
        """Plan anew, now that a decoder knows how many anchors it has; all ranks call it.

        Args:
            rows: What is new, for the plan's notes.
        """
        with _as_in_setup(self._strategy.root_device):
            with self._installed.aside():
                self._foreign.stand_in()
                plan = self._plan()
                notes = f"{rows}: planned anew for these", *self._foreign.compare(plan)
            plan = replace(plan, notes=tuple(dict.fromkeys((*plan.notes, *notes))))
            self._strategy.plan = plan
            announce(plan, unfit=self._strategy.unfit)
            self._renew(plan)

    def _plan(self) -> Plan:
        before, notes = self._strategy.plan, self._foreign.notes
        assert before is not None, "planned in setup"
        unknown = any(note.startswith(UNKNOWN) for note in before.notes)
        cells = (None, UNKNOWN) if unknown else (before.batch_size, "")
        wanted = plan_in_force(self._strategy, self._trainer, notes=notes, cells=cells)
        if _split(wanted) == _split(before):
            return wanted
        kept = plan_in_force(self._strategy, self._trainer, notes=notes, cells=cells, given=before)
        note = (
            f"for the rows that v has the choice would be {','.join(wanted.strategies)} on {wanted.mesh.data} x"
            f" {wanted.mesh.model} ranks (data x model), which a run that has begun cannot change to; ask for it with"
            f" strategies and model_parallel_size={wanted.mesh.model}"
        )
        return replace(kept, notes=(*kept.notes, note))

    def _renew(self, plan: Plan) -> None:
        """Install anew what lies in the decoders; all else is what optimisers know, and the same."""
        names, swaps = list(self._foreign.decoders), self._installed.swaps
        outside = [swap for swap in swaps if not lies_in(swap.fqn, names)]
        self._installed.swaps = [swap for swap in swaps if lies_in(swap.fqn, names)]
        self.undo()
        self._installed.swaps = outside + self._made(plan, within=names).swaps
        self._foreign.keep(swap.fqn for swap in self._installed.swaps)

    def _made(self, plan: Plan, *, within: list[str] | None = None) -> Installed:
        model = self._strategy.model
        assert model is not None, "the Trainer sets the model before setup"
        check_compiled(model, plan)
        return install(model, plan, self._strategy.mesh, within=within)


def _split(plan: Plan) -> tuple[object, ...]:
    """What ranks have parts of."""
    return plan.mesh, plan.axes.placement, plan.axes.features, "S2" in plan.strategies


@contextmanager
def _as_in_setup(device: torch.device) -> Iterator[None]:
    """Inside of a step, what planning finds out by trying is as it was before it, and draws no numbers of the step."""
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.random.fork_rng(devices=[]),
        torch.autocast(device.type, enabled=False),
    ):
        yield
