"""Define `Technique`, a row of the table of techniques, with `Prediction` (effect on a step) and `Installer`.

A row is plain data, so that planning does not import torch. Functions that need torch are given as "module:function"
and imported when they are called.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, TypeVar

from lightning_amp.costs.device_rates import Rates
from lightning_amp.costs.model_shape import DecoderShape, ModelShape
from lightning_amp.costs.profiled_step import Draft, ProfiledStep
from lightning_amp.costs.rule import Spec
from lightning_amp.errors import AmpError
from lightning_amp.footprint.module_profile import ModuleProfile

T = TypeVar("T")
UNEXPECTED = "an unexpected error occurred"
"""How the reason begins if a search has failed, of which every plan has a note."""
Target = tuple[str, Spec]
"""Name or pattern of modules to change, and what to install there."""
Add = Callable[[ProfiledStep, Draft, int | None], Draft | str]
"""(step, draft, budget) -> the draft with the technique, or why it cannot be added. With a budget, as much of the
technique as is needed to fit, or the version with the least memory if nothing fits; with None, all of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Effect of a technique on the peak memory and the seconds of any module's step.

    Attributes:
        add: Adds the technique to a draft plan.
        kinds: Kinds of bytes that it makes smaller.
        limit: Why it may not help if these kinds are most of the peak.
        notes: Step -> what users should know of a plan with it.
        order: Place in the order in which techniques are added to a draft.
        needs_ranks: Number of ranks that it needs at least.
        counted: Whether its savings show when the step is counted on one device with its rules installed.
        slow: Whether its search takes seconds, which are saved if a step fits without it.
        last_resort: Whether it is combined with others only if no plan that fits is as fast as that could be. Its own
            seconds are the same beside others.
        quiet: Whether a diagnosis leaves it out of steps that refuse it: those of modules that it is not made for.
        variants: Step and ranks -> the step with each way to apply the technique; the fastest that fits is taken.
        last_variants: The same, of ways that are compared only if nothing else fits the budget.
    """

    add: Add
    kinds: tuple[str, ...]
    limit: str
    order: int
    needs_ranks: int = 1
    counted: bool = True
    slow: bool = False
    last_resort: bool = False
    quiet: bool = False
    variants: Callable[[ProfiledStep, int], Iterator[ProfiledStep]] | None = None
    last_variants: Callable[[ProfiledStep, int], Iterator[ProfiledStep]] | None = None
    notes: Callable[[ProfiledStep], Iterator[str]] | None = None


@dataclass(frozen=True, slots=True)
class Installer:
    """Install function of a type of spec, and how its rules are matched to modules.

    Attributes:
        function: (module, spec, mesh) -> the module's replacement or a Change; "module:function" if it needs torch.
        on_decoder: Whether the rule names a decomposed decoder; otherwise a leaf or a layer, which the function checks.
        on_blocks: Whether a pattern means only the outermost modules that it matches, and not modules inside them.
        last: Whether it is installed after all others, because it runs modules that others replace.
    """

    function: str | Callable[..., Any]
    on_decoder: bool = False
    on_blocks: bool = False
    last: bool = False

    def load(self) -> Callable[..., Any]:
        """Return the function; import it if it is given by name."""
        return function_at(self.function) if isinstance(self.function, str) else self.function


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnSteps:
    """Replacements of a LightningModule's steps, and what they can be combined with.

    Gradients of these steps are averaged over the model axis too, unless the units of the technique's
    `split_parameters` reduce them.

    Attributes:
        module: Module whose `install(module, spec, mesh)` returns the replacements, by name.
        works_with: Other techniques that it can be combined with.
        not_with: By other technique, why it cannot be combined and what to do instead. "{less}" stands for advice on
            how a rank holds less; techniques not listed have a general reason.
        uncounted: What to do if the first step cannot be counted.
    """

    module: str
    works_with: tuple[str, ...] = ()
    not_with: Mapping[str, str] = field(default_factory=dict)
    uncounted: str

    def load(self) -> Any:
        """Import and return the module."""
        return import_module(self.module)


@dataclass(frozen=True, kw_only=True, slots=True)
class Technique:
    """One row of the table.

    Attributes:
        title: What it does, in a few words.
        shrinks: The tensor that it makes smaller.
        specs: Types of the specs in its rules.
        installers: Installer of each type of spec; none if the Lightning strategy carries it out itself, as data
            parallelism and replaced steps.
        targets: Shape of the model -> names or patterns of the modules to change, each with a spec; None for S1, whose
            rules follow from the mesh.
        signal: The signal of AMP for which policies choose it; None if only users choose it.
        choice: Its choice on an axis of the decoder (`Axes`); a technique with one requires a decomposed decoder.
        conflicts: Techniques that it cannot be combined with, and why.
        no_decoder: Why it cannot be combined with techniques that have a choice on an axis of the decoder.
        model_axis: Whether it splits a module over the model axis of the mesh.
        data_axis: Whether it shards parameters over the data axis; the Lightning strategy itself carries it out.
        prediction: Effect on the step of any module; None if it applies to decoders only, or only users choose it.
        look: "module:function" that measures on a step what `prediction` needs (`ProfiledStep.facts`).
        search: "module:name" of the `StageSearch`, for a technique whose stages the planner chooses.
        read_step: "module:function": (module, counted step) -> the same facts as `look`, if one counted step suffices.
        refusal: "module:function": (module, counted step, values=) -> why the module does not support it, or "".
        unsuited: (shape of the model, strategies of the plan) -> why it cannot be in the plan, or "".
        settle: (spec, shape of the model, ranks of the model axis) -> the spec with fields that depend on these.
        option_names: Options of AMPStrategy that configure it.
        options: (spec, request) -> the spec with these, and whether they determine it fully. May raise PlanError.
        contradictions: (specs of its rules, ranks that average gradients) -> one sentence for each contradiction.
        remark: (requested spec, whether the device is not the host's CPU) -> what users should know, or "".
        split_parameters: For a technique that shards parameters over the ranks that average gradients:
            "module:function" that does so, (model, rules, mesh of these ranks, groups_of=, fitting=) -> Units.
        evaluation: (bytes, rates of the device) -> the spec with which a module stays within these bytes also in steps
            without gradients; None for techniques of training steps only.
        validation: For a technique that shards parameters: (profiled step, its spec, profile of the validation step on
            one device, ranks of the data axis) -> peak bytes of a rank in the validation of a fit.
        code: "module:function": (step to plan, rules) -> Python source of what the modules of its rules run.
        beside_compiled: Whether `AMPStrategy(compile=)` may compile blocks in a plan with it: its code lies around the
            forward of blocks, or outside of them.
        runs_compiled: Whether its plan was counted with compiled modules, so that no batch may run them uncompiled.
        between_batches: Whether a run may install or remove it between two batches: it keeps nothing from one to the
            next, and changes neither parameters nor optimizers.
        registered: Whether it was added by `register_technique`.
        steps: What replaces a LightningModule's steps; None if it replaces none.
        works_in_any_steps: Whether it works with all techniques with `steps`: it changes no steps, or any.
        shape_after: For a registered technique: (shape of the model, ranks of the model axis) -> shape for the memory
            model; None leaves its savings out.
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
    evaluation: Callable[[int, Rates], Spec] | None = None
    validation: Callable[[ProfiledStep, Any, ModuleProfile, int], int] | None = None
    code: str = ""
    beside_compiled: bool = False
    runs_compiled: bool = False
    between_batches: bool = False
    registered: bool = False
    steps: OwnSteps | None = None
    works_in_any_steps: bool = False
    shape_after: Callable[[ModelShape, int], ModelShape] | None = None


def result_or_reason(search: Callable[..., T], *args: Any, **named: Any) -> T | str:
    """Return the result of a technique's search; an unexpected error is returned as the reason why it has none.

    No search may end a plan, which other techniques may make. An AmpError is raised: it is a refusal.
    """
    try:
        return search(*args, **named)
    except AmpError:
        raise
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        return f"{UNEXPECTED} while it was searched, {type(error).__name__}: {first}; please report it"


def function_at(path: str) -> Callable[..., Any]:
    """Import and return the function of a path "module:function"."""
    module, _, name = path.partition(":")
    found: Callable[..., Any] = getattr(import_module(module), name)
    return found


def on_decoder(spec_of: Callable[[DecoderShape], Spec], leaf: str = "") -> Callable[[ModelShape], list[Target]]:
    """Return a `targets` function for a technique that changes the decoder, or the same leaf of each of its strata."""

    def targets(shape: ModelShape) -> list[Target]:
        return [(shape.decoder.fqn + (leaf and f".strata.*.{leaf}"), spec_of(shape.decoder))]

    return targets
