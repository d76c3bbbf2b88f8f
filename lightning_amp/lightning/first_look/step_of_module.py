"""A run's module without a decoder -> its training step, profiled on rank 0 before anything is installed.

It takes a second or two, and is done in every fit: what holds the memory is said also where everything fits. It is not
done to validate, test or predict. A step that cannot be profiled is trained as on a plain Trainer, and the plan says
why.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any, TypeVar

import lightning.pytorch as pl
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn

from lightning_amp.dist.own_parts import OwnParts
from lightning_amp.errors import AmpError, DataError, InstallError, ModelError
from lightning_amp.footprint.chain.block_call import BlockCall
from lightning_amp.footprint.chain.chain import Chain
from lightning_amp.footprint.chain.chain_of import CountedStep, chain_of, count_step
from lightning_amp.footprint.chain.chain_recorder import OperatorRates
from lightning_amp.footprint.chain.passes import Passes
from lightning_amp.footprint.inner_run import Around, EnoughSeen
from lightning_amp.footprint.module_profile import ModuleProfile
from lightning_amp.footprint.profile_module import counted_step, profile_module
from lightning_amp.footprint.step_recorder import StepRecorder
from lightning_amp.lightning.first_look.cells_per_step import training_loaders
from lightning_amp.lightning.first_look.dry_steps import DrySteps
from lightning_amp.lightning.first_look.example_batch import example_batch
from lightning_amp.techniques.chunk.block_tables import block_code, block_tables
from lightning_amp.techniques.contract.protocol import find_decoders
from lightning_amp.techniques.fsdp.refusals import SWAPPED, refuse
from lightning_amp.techniques.fsdp.units import find_units, units_of
from lightning_amp.installing.install import install_rules
from lightning_amp.techniques.pipeline.blocks import blocks_for_stages
from lightning_amp.techniques.data.batch_norm import statistics_bytes
from lightning_amp.techniques.chunk.forms import ChunkForms
from lightning_amp.costs.profiled_step import Seen, StageChunks
from lightning_amp.planning.modules.techniques import TECHNIQUES
from lightning_amp.planning.plan.plan import Explanation, Rule
from lightning_amp.techniques.specs import ChunkBlock, FullyShard, Spec
from lightning_amp.techniques.table import STRATEGIES, not_together
from lightning_amp.costs.device_rates import Rates
from lightning_amp.quantities import format_bytes
from lightning_amp.techniques.put_methods import method_of, put_methods, refuse_unseen
from lightning_amp.techniques.replay.choose_cuts import Replays, Stretches
from lightning_amp.techniques.replay.install import recorded
from lightning_amp.techniques.replay.look import Look, stretches_of

T = TypeVar("T")


class StepOfModule:
    """One training step of a module.

    Args:
        module: Without a decoder.
        take_batch: Gives one batch, or raises an AmpError.
        around: What is known of the run.
        batch_size: Another length of the batch.
        trains: Whether the module itself is to train; one that is only planned may be without values.
        steps: Steps that take the place of the module's while it is counted.
    """

    def __init__(
        self,
        module: LightningModule,
        take_batch: Callable[[], Any],
        *,
        around: Around,
        batch_size: int | None = None,
        trains: bool = False,
        steps: DrySteps | None = None,
    ) -> None:
        if steps is not None:
            own = OwnParts(size=steps.ranks, axis=lambda: steps.axis)
            around = replace(around, own_parts=own)
        self._module, self._take_batch, self._around = module, take_batch, around
        self._trains, self._steps = trains, steps
        self._batch_size = batch_size
        self._calls: dict[int | None, tuple[BlockCall, ...]] = {None: ()}
        self._batch: Any = None
        self._profiles: dict[frozenset[tuple[str, str]], ModuleProfile] = {}
        self._counts: dict[tuple[tuple[str, Spec], ...], ModuleProfile] = {}
        self._blocks, self._no_stages = blocks_for_stages(module)
        self._passes: dict[int | None, Passes | str] = {}
        self._forms: dict[int, ChunkForms] = {}
        self._chunked: dict[tuple[int, frozenset[tuple[str, ChunkBlock]]], Passes | str] = {}
        self._plans: dict[Any, Any] = {}
        self._steps_with: dict[tuple[str, Spec], CountedStep | str] = {}
        self._replays: dict[tuple[tuple[str, Spec], ...], Replays] = {}

    @classmethod
    def of(
        cls,
        trainer: pl.Trainer,
        *,
        decoder: bool = False,
        values: bool = True,
        limit_bytes: int | None = None,
        steps: DrySteps | None = None,
    ) -> "StepOfModule | None":
        """The step of a fit that is set up as far as its strategy; None of anything else, and where there is a decoder,
        or none if one was looked for. Without `values` a step that needs them is not counted, and with `limit_bytes` it
        is refused where it takes more.

        All ranks call it, and rank 0 uses it.
        """
        module = trainer.lightning_module
        if trainer.state.fn != TrainerFn.FITTING or bool(find_decoders(module)) != decoder:
            return None
        around = Around.of(trainer, prepared=True, datamodule=getattr(trainer, "datamodule", None))
        own = getattr(trainer.strategy, "own_parts", None)
        around = replace(around, values=values, limit_bytes=limit_bytes, own_parts=own)
        loaders, why = training_loaders(trainer)
        return cls(module, partial(_batch_of, loaders, why), around=around, trains=True, steps=steps)

    def seen(self, rates: Rates, *, fsdp: FullyShard | None = None, shared_statistics: bool = False) -> Seen:
        """Take one batch and profile the step as it is.

        Args:
            rates: What the device reaches.
            fsdp: How it is to split, None leaves it to the policy.
            shared_statistics: Whether ranks exchange the statistics of batches.

        Raises:
            AmpError: There is no batch to be had, or the step cannot be run on a copy of the module.
            PlanError: It needs values, and takes more than its limit.
        """
        self.take()
        if self._steps is not None:
            return replace(self._seen_stepped(self._steps, rates), fsdp=fsdp)
        step = self._count_step(None, rates)
        self._profiles[_places(())], chain = step.profile, step.chain
        tables = partial(block_tables, self._module, self._calls[None], shared=shared_statistics)
        return Seen(
            profile=step.profile,
            chain=chain,
            units=units_of(self._module),
            rates=rates,
            passes=partial(self._passes_of, rates=rates) if self._blocks else None,
            no_stages=self._no_stages,
            chunks=ChunkForms(chain, tables),
            stage_chunks=StageChunks(
                forms=partial(self._forms_of, rates=rates), passes=partial(self._in_chunks, rates=rates)
            ),
            fsdp=fsdp,
            refused=refused_techniques(self._module, step, values=self._trains),
            statistics_bytes=statistics_bytes(self._module),
            notes=tuple(self._notes(step)),
            replays=partial(self._replays_with, rates=rates),
            counted=partial(self._counted_with, rates=rates),
        )

    def _counted_with(self, rule: Rule, *, rates: Rates) -> CountedStep | str:
        """The step with a rule, or why it cannot have it."""
        key = rule.fqn, rule.spec
        if key not in self._steps_with:
            try:
                with self._installed([rule]):
                    step = self._steps_with[key] = self._recorded(None, rates)
                self._counts[key,] = step.profile
            except AmpError as error:
                self._steps_with[key] = str(error)
        return self._steps_with[key]

    def _replays_with(self, rules: tuple[Rule, ...], *, rates: Rates) -> Replays:
        """Stretches of the step with rules."""
        key = tuple((rule.fqn, rule.spec) for rule in rules)
        return self._replays.setdefault(key, Replays(partial(self._stretches, rates, rules)))

    def _stretches(self, rates: Rates, rules: tuple[Rule, ...]) -> Stretches | str:
        """What stretches of the step hold and take, or why it is not known."""
        found = list[Stretches]()
        try:
            with self._installed(rules):
                refuse_unseen("replay", self._module)
                step = method_of(self._module, "training_step")

                def training_step(module: LightningModule, *args: Any, **kwargs: Any) -> Any:
                    automatic = module.automatic_optimization
                    if automatic:
                        # what a module makes once, as tables of positions, is no part of later steps
                        step(module, *args, **kwargs)
                    look = Look(operator_rates(rates))
                    with recorded(look, module):
                        loss = step(module, *args, **kwargs)
                    found.append(stretches_of(look))
                    # one that optimises by itself has the state of its optimisers in the second step
                    if automatic or len(found) == 2:
                        raise EnoughSeen
                    return loss

                undo = put_methods(self._module, {"training_step": MethodType(training_step, self._module)})
                try:
                    self._counted(partial(counted_step, make=StepRecorder))
                finally:
                    undo()
        except AmpError as error:
            return str(error)
        return found[-1]

    def _seen_stepped(self, steps: DrySteps, rates: Rates) -> Seen:
        """Of rank 0 with the steps of a technique, and what that goes together with."""
        found = steps.choose(self._batch, lambda: self._count_step(None, rates), rates.links)
        step = found or self._count_step(None, rates)
        self._profiles[_places(())] = step.profile
        together = STRATEGIES[steps.name].together
        others = {other: not_together(steps.name, other) for other in TECHNIQUES if other not in together}
        return Seen(
            profile=step.profile,
            chain=step.chain,
            # what splits parameters too averages no whole gradients
            units=() if STRATEGIES[steps.name].data_axis else units_of(self._module),
            rates=rates,
            no_stages=not_together(steps.name, "pipeline"),
            refused={**refused_techniques(self._module, step, values=self._trains), **others},
            sent_seconds=steps.sent_seconds(rates.links),
            averages=not STRATEGIES[steps.name].data_axis,
            notes=(*self._notes(step), *steps.notes, *steps.sent_notes()),
        )

    def _notes(self, step: CountedStep) -> Iterator[str]:
        if step.profile.reason:
            yield Explanation(
                f"the step was measured with real values before it was planned: {step.profile.reason}"
            )
        if step.decides and step.chain.blocks:
            yield (
                "the step draws random numbers in Python: if they decide which blocks run, as in stochastic depth, this"
                " is the peak of one draw, and another one can take more"
            )
        frozen = sum(p.nbytes for p in self._module.parameters() if not p.requires_grad)
        if frozen and self._around.unfreezes:
            yield Explanation(
                f"{format_bytes(frozen)} of parameters are frozen, and counted as if they were trained, for a callback"
                " unfreezes some"
            )
        elif frozen:
            yield Explanation(
                f"{format_bytes(frozen)} of parameters are frozen, and counted so; on a CPU a budget that was named is"
                " held where they are unfrozen later"
            )

    def with_steps(self, steps: DrySteps) -> "StepOfModule":
        """The same step, in which those of a technique take the place of the module's."""
        return StepOfModule(
            self._module,
            self._take_batch,
            around=self._around,
            batch_size=self._batch_size,
            trains=self._trains,
            steps=steps,
        )

    def take(self) -> None:
        """Take one batch, as `seen` does; for `count` and `chain_with` alone."""
        self._batch, self._counts = self._take_batch(), {}

    def forget(self) -> None:
        """Let go of the batch; nothing more is counted."""
        self._batch = None

    def _passes_of(self, rows: int | None, *, rates: Rates) -> Passes | str:
        """Counted for two lengths of the batch, and for others on the line through these."""
        whole = self._passes[None]
        if rows is None or isinstance(whole, str) or rows == whole.rows:
            return whole
        counted = next((one for one in self._passes.values() if one is not whole), None)
        between = whole.at(counted, rows) if isinstance(counted, Passes) else None
        if between is None and rows not in self._passes:
            try:
                self._count_step(rows, rates)
            except AmpError as error:
                # rows of a graph, or of sequences end to end, are no batch by themselves
                self._passes[rows] = (
                    f"a micro-batch of {rows} of the batch's {whole.rows} rows cannot be counted: {error}"
                )
        return self._passes[rows] if between is None else between

    def _count_step(self, rows: int | None, rates: Rates) -> CountedStep:
        """Of a batch of some length, with its passes and calls kept."""
        step = self._recorded(rows, rates)
        self._passes[rows], self._calls[rows] = step.passes, step.calls
        return step

    def _recorded(self, rows: int | None, rates: Rates) -> CountedStep:
        return self._counted(partial(count_step, names=self._blocks, rates=operator_rates(rates)), rows)

    def _forms_of(self, rows: int, *, rates: Rates) -> ChunkForms:
        """The forms in chunks of the blocks of a micro-batch."""
        if rows not in self._forms:
            chain = self._count_step(rows, rates).chain
            self._forms[rows] = ChunkForms(chain, partial(block_tables, self._module, self._calls[rows]))
        return self._forms[rows]

    def _in_chunks(self, rows: int, chunks: Mapping[str, ChunkBlock], *, rates: Rates) -> Passes | str:
        """The passes of a micro-batch of which some blocks run in chunks, or why one of them cannot."""
        key = rows, frozenset(chunks.items())
        if key not in self._chunked:
            rules = [
                Rule(fqn=fqn, spec=spec, strategy="chunk", why="counted") for fqn, spec in chunks.items()
            ]
            try:
                with self._installed(rules):
                    self._chunked[key] = self._recorded(rows, rates).passes
            except AmpError as error:
                self._chunked[key] = str(error)
        return self._chunked[key]

    def count(self, rules: Sequence[Rule]) -> ModuleProfile:
        """Profile the step with rules installed, once for the same rules, and undo them; for after `seen` or `take`.

        Raises:
            AmpError: A technique refuses the module, or the step fails with it.
        """
        key = tuple((rule.fqn, rule.spec) for rule in rules)
        if key not in self._counts:
            with self._installed(rules):
                self._counts[key] = self._counted(profile_module)
        self._profiles[_places(rules)] = self._counts[key]
        return self._counts[key]

    def chain_with(self, rules: Sequence[Rule], rates: Rates) -> Chain:
        """The blocks of the step with rules installed, which are undone; for after `take`.

        Raises:
            AmpError: As of `count`.
        """
        with self._installed(rules):
            return self._counted(partial(chain_of, rates=operator_rates(rates)))

    @contextmanager
    def _installed(self, rules: Sequence[Rule]) -> Iterator[None]:
        installed = install_rules(self._module, rules, chunks=self._plans)
        try:
            yield
        finally:
            installed.undo()

    def profile_with(self, rules: Sequence[Rule]) -> ModuleProfile | None:
        """What `seen` or `count` has found last with rules for the same modules; None where none has."""
        return self._profiles.get(_places(rules))

    def code(self, rules: Sequence[Rule]) -> str:
        """What the blocks run that rules of `chunk` name, as Python; for after `seen`."""
        budgets = {rule.fqn: rule.spec.budget_bytes for rule in rules if isinstance(rule.spec, ChunkBlock)}
        found = block_code(self._module, self._calls[None], budgets)
        return "\n\n\n".join(f"# {names}\n{code}" for names, code in found.items())

    def _counted(self, count: Callable[..., T], rows: int | None = None) -> T:
        size = self._batch_size if rows is None else rows
        undo = None if self._steps is None else self._steps.put(self._module)
        try:
            return count(self._module, self._batch, batch_size=size, around=self._around)
        except AmpError:
            raise
        except Exception as error:
            raise ModelError(
                f"a profile was asked for of {type(self._module).__name__!r}, which failed in a way that it should not:"
                f" {type(error).__name__}: {error}"
            ) from error
        finally:
            if undo is not None:
                undo()


def refused_techniques(module: LightningModule, step: CountedStep, *, values: bool) -> dict[str, str]:
    """Techniques that the module is known to refuse, or that its step has shown to be impossible, and why."""
    units = find_units(module)
    gone_back = [unit for unit in units if any(f"{fqn}.".startswith(f"{unit}.") for fqn in step.went_back)]
    swapped, why = [unit for unit in units if unit in step.swapped], ""
    try:
        refuse(module, units, values=values)
    except InstallError as error:
        why = str(error)
    if swapped:
        why = why or SWAPPED.format(swapped[0])
    if gone_back:
        why = why or (
            "the step takes gradients while it runs (torch.autograd.grad, as for a gradient penalty, or torch.func),"
            f" for which the parameters of {gone_back[0]!r} would have to be gathered once more: train with"
            " strategies='S1', or, where it is loss.backward(), call self.manual_backward(loss)"
        )
    return {**({"fsdp": why} if why else {}), **step.refused}


def _places(rules: Sequence[Rule]) -> frozenset[tuple[str, str]]:
    return frozenset((rule.fqn, rule.strategy) for rule in rules)


def operator_rates(rates: Rates) -> OperatorRates:
    """What of a device's rates the time of an operator follows from."""
    return OperatorRates(
        matmul_flops=rates.matmul_flops,
        memory_bytes=rates.memory_bytes,
        overhead_seconds=rates.overhead_seconds,
    )


def _batch_of(loaders: object, why: str) -> Any:
    if loaders is None:
        raise DataError(why or "the training loader is made anew every few epochs, or there is none")
    return example_batch(loaders)
