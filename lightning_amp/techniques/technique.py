"""Define a row of the table of techniques: `Technique`, with how it is predicted and how it is installed.

A row is plain data, so that planning imports no torch. Functions that need torch are named as "module:function" and
imported when they are called.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from lightning_amp.costs.model_shape import DecoderShape, ModelShape
from lightning_amp.costs.profiled_step import Draft, ProfiledStep
from lightning_amp.costs.rule import Spec

Target = tuple[str, Spec]
"""Name or pattern of modules to change, and what to install there."""
Add = Callable[[ProfiledStep, Draft, int | None], Draft | str]
"""(step, draft, budget) -> the draft with the technique, or why it cannot be added. With a budget, as much of the
technique as is needed to fit, and the least memory where that is not enough; with None all of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What a technique changes in the peak and the seconds of any module's step.

    Attributes:
        add: Adds the technique to a draft plan.
        kinds: Kinds of bytes that it makes smaller.
        limit: Why it may not help where these are most of the peak.
        notes: Step -> what a person should know of a plan with it.
        turn: Place in the order in which techniques are added to a draft.
        fewest: Ranks that it needs.
        counted: Whether a count of the step with its rules installed, on one device, has what it saves.
        slow: Whether looking for it takes seconds, which are not spent where a step fits without.
        variants: Step and ranks -> the step with each way to apply the technique; the fastest that fits is taken.
    """

    add: Add
    kinds: tuple[str, ...]
    limit: str
    turn: int
    fewest: int = 1
    counted: bool = True
    slow: bool = False
    variants: Callable[[ProfiledStep, int], Iterator[ProfiledStep]] | None = None
    notes: Callable[[ProfiledStep], Iterator[str]] | None = None


@dataclass(frozen=True, slots=True)
class Installer:
    """How a type of spec is installed.

    Attributes:
        function: (module, spec, mesh) -> the module's replacement or a Change; "module:function" where it needs torch.
        on_decoder: Whether the rule names a decomposed decoder; else a leaf or a layer, which the function checks.
        on_blocks: Whether a pattern means the outermost modules that it matches, and no parts of these.
        last: Whether it is installed after all others: it runs modules that others have replaced by then.
    """

    function: str | Callable[..., Any]
    on_decoder: bool = False
    on_blocks: bool = False
    last: bool = False

    def load(self) -> Callable[..., Any]:
        """The function."""
        return function_at(self.function) if isinstance(self.function, str) else self.function


@dataclass(frozen=True, kw_only=True, slots=True)
class Technique:
    """One row of the table.

    Attributes:
        shrinks: The tensor that it makes smaller.
        specs: Types of the specs that its rules have.
        installers: How each of them is installed; none for what the Lightning strategy carries out by itself, such as
            data parallelism and steps that replace the module's.
        targets: Shape of the model -> names or patterns of the modules to change, and what to install there; None
            for S1, whose rules follow from the mesh.
        signal: The signal of AMP that calls for it, None when only a person does.
        choice: Its choice on an axis of the decoder (`Axes`); a technique with one requires a decomposed decoder.
        conflicts: Techniques that it cannot be together with, and why.
        no_decoder: Why it cannot be together with techniques that have a choice on an axis of the decoder.
        model_axis: Whether it splits a module over the model axis of the mesh.
        data_axis: Whether it splits parameters over the data axis; the Lightning strategy itself carries it out.
        prediction: How it changes the step of any module; None where only decoders have it, or a person names it.
        look: "module:function" that reads from a step what `prediction` needs (`ProfiledStep.facts`).
        search: "module:name" of the `StageSearch`, of a technique whose stages the planner cuts.
        read_step: "module:function": (module, counted step) -> the same, where one count of the step shows it.
        refusal: "module:function": (module, counted step, values=) -> why the module cannot have it, or "".
        unsuited: (shape of the model, strategies of the plan) -> why it cannot be in the plan, or "".
        settle: (spec, shape of the model, ranks of the model axis) -> the spec with what depends on these.
        option_names: Options of AMPStrategy that say how it is done.
        options: (spec, request) -> the spec with these options, and whether they say all of it. May raise PlanError.
        contradictions: (specs of its rules, ranks that average gradients) -> what cannot be, one sentence each.
        remark: (requested spec, whether the device is another one than the host's processor) -> what a person should
            know, or "".
        split_parameters: Of a technique that splits parameters over the data axis, without `steps`:
            "module:function" that does so, (model, rules, mesh, groups_of) -> units.
        evaluation: Bytes -> the spec by which a module runs within these in steps without gradients too; None for
            techniques of training steps.
        code: "module:function": (step to plan, rules) -> what the modules of its rules run, as Python.
        registered: Whether it was added by `register_technique`.
        steps: Module whose `install(module, spec, mesh)` gives what takes the place of a LightningModule's steps, by
            name. Gradients of these steps are averaged over the model axis too, unless its `split_parameters` gives
            what splits and reduces them. "" for all others.
        in_any_steps: Whether it goes together with all techniques with `steps`, which it leaves as they are.
        together: Of a technique with `steps`: the others that it goes together with.
        apart: Of a technique with `steps`: why others do not, and what to do instead, for which there is "{less}": what
            makes a rank hold less; others have a general reason.
        without_step: Of a technique with `steps`: what to do where the first step cannot be counted.
        shape_after: Of a registered technique: shape of the model and ranks of the model axis -> shape that the
            memory model sees instead; None leaves its savings out.
    """

    title: str
    shrinks: str
    specs: tuple[type[Spec], ...]
    installers: Mapping[type[Spec], Installer] = field(default_factory=dict)
    targets: Callable[[ModelShape], Iterable[Target]] | None = None
    signal: str | None = None
    choice: tuple[str, str] | None = None
    conflicts: Mapping[str, str] = field(default_factory=dict)
    no_decoder: str = ""
    model_axis: bool = False
    data_axis: bool = False
    prediction: Prediction | None = None
    look: str = ""
    search: str = ""
    read_step: str = ""
    refusal: str = ""
    unsuited: Callable[[ModelShape, Collection[str]], str] | None = None
    settle: Callable[[Any, ModelShape, int], Spec] | None = None
    option_names: tuple[str, ...] = ()
    options: Callable[[Any, Any], tuple[Spec, bool]] | None = None
    contradictions: Callable[[Sequence[Any], int], Iterator[str]] | None = None
    remark: Callable[[Any, bool], str] | None = None
    split_parameters: str = ""
    evaluation: Callable[[int], Spec] | None = None
    code: str = ""
    registered: bool = False
    steps: str = ""
    in_any_steps: bool = False
    together: tuple[str, ...] = ()
    apart: Mapping[str, str] = field(default_factory=dict)
    without_step: str = ""
    shape_after: Callable[[ModelShape, int], ModelShape] | None = None


def function_at(path: str) -> Callable[..., Any]:
    """The function that "module:function" names."""
    module, _, name = path.partition(":")
    found: Callable[..., Any] = getattr(import_module(module), name)
    return found


def on_decoder(spec_of: Callable[[DecoderShape], Spec], leaf: str = "") -> Callable[[ModelShape], list[Target]]:
    """Targets of a technique that changes the decoder, or the same leaf of each of its strata."""

    def targets(shape: ModelShape) -> list[Target]:
        return [(shape.decoder.fqn + (leaf and f".strata.*.{leaf}"), spec_of(shape.decoder))]

    return targets
