"""List all techniques in the order of installation, and answer questions about ids: order, conflicts, options, targets.

S1 to S5 and their signals are those of Zhang et al. 2026, Table 4. Ours and registered techniques follow. Each row
holds all that planning and installation need, and lies in the technique's folder. How policy "paper" reads the signals
is in `policies/paper.py`.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import cache
from typing import Any

from lightning_amp.costs.model_shape import ModelShape
from lightning_amp.costs.rule import Rule, Spec
from lightning_amp.errors import PlanError
from lightning_amp.techniques.chunk.row import ROW as CHUNK
from lightning_amp.techniques.compile.row import ROW as COMPILE
from lightning_amp.techniques.compiled_budget.row import ROW as COMPILED_BUDGET
from lightning_amp.techniques.data.row import ROW as S1
from lightning_amp.techniques.early_update.row import ROW as EARLY_UPDATE
from lightning_amp.techniques.fsdp.row import ROW as FSDP
from lightning_amp.techniques.hic.rows import FUSED, NODES, S2, S3, S4, S5, SDPA, SPARSE, STRATA, STREAM
from lightning_amp.techniques.host_optimizer.row import ROW as HOST_OPTIMIZER
from lightning_amp.techniques.logits.row import ROW as LOGITS
from lightning_amp.techniques.offload.row import ROW as OFFLOAD
from lightning_amp.techniques.pipeline.row import ROW as PIPELINE
from lightning_amp.techniques.recompute.row import ROW as RECOMPUTE
from lightning_amp.techniques.replay.row import ROW as REPLAY
from lightning_amp.techniques.sequence.row import ROW as SEQUENCE
from lightning_amp.techniques.stage_search import StageSearch
from lightning_amp.techniques.technique import Installer, OwnSteps, Prediction, Target, Technique, function_at
from lightning_amp.techniques.tensor3d.row import ROW as TENSOR3D

STRATEGIES: dict[str, Technique] = {
    "S1": S1,
    "S2": S2,
    "S3": S3,
    "S4": S4,
    "S5": S5,
    "fused": FUSED,
    "sdpa": SDPA,
    "sparse": SPARSE,
    "nodes": NODES,
    "recompute": RECOMPUTE,
    "stream": STREAM,
    "compile": COMPILE,
    "strata": STRATA,
    "pipeline": PIPELINE,
    "fsdp": FSDP,
    "chunk": CHUNK,
    "compiled_budget": COMPILED_BUDGET,
    "logits": LOGITS,
    "replay": REPLAY,
    "offload": OFFLOAD,
    "host_optimizer": HOST_OPTIMIZER,
    "early_update": EARLY_UPDATE,
    "sequence": SEQUENCE,
    "tensor3d": TENSOR3D,
}
PREDICTIONS: dict[str, Prediction] = dict(
    sorted(
        ((name, row.prediction) for name, row in STRATEGIES.items() if row.prediction is not None),
        key=lambda item: item[1].order,
    )
)
"""Predictions of techniques that apply to the step of any module, in the order in which a draft gets them."""
OF_BLOCKS = tuple(
    name for name in PREDICTIONS if any(installer.on_blocks for installer in STRATEGIES[name].installers.values())
)
"""Techniques of `PREDICTIONS` whose rules name blocks."""
BETWEEN_BATCHES = tuple(name for name in PREDICTIONS if STRATEGIES[name].between_batches)
"""Techniques of `PREDICTIONS` that a run may install or remove between two batches."""
STAGED = next(name for name, row in STRATEGIES.items() if row.search)
"""The technique whose stages the planner chooses."""
EVALUATED, evaluated_within = next(
    (name, row.evaluation) for name, row in STRATEGIES.items() if row.evaluation is not None
)
"""The technique that keeps steps without gradients within a budget; the function from bytes and rates to its spec."""


@cache
def stage_search() -> StageSearch:
    """Return the search for stages of the technique `STAGED`."""
    # imported on first use: the search needs this table, and numpy
    found: object = function_at(STRATEGIES[STAGED].search)
    assert isinstance(found, StageSearch), "the row names one"
    return found


def installer_of(spec: type[Spec]) -> Installer | None:
    """Return the installer of a type of spec; None if the Lightning strategy carries it out itself."""
    return next((row.installers[spec] for row in STRATEGIES.values() if spec in row.installers), None)


def is_of_block(rule: Rule) -> bool:
    """Whether a rule names a block of any module instead of a decoder."""
    found = installer_of(type(rule.spec))
    return found is not None and found.on_blocks


def on_axis(*axes: str) -> tuple[str, ...]:
    """Techniques that are a choice on one of these axes of the decoder."""
    return tuple(name for name, row in STRATEGIES.items() if row.choice is not None and row.choice[0] in axes)


def is_of_decoder(rule: Rule) -> bool:
    """Whether a rule changes a decomposed decoder, or strata of it."""
    return STRATEGIES[rule.strategy].choice is not None and not is_of_block(rule)


def leaves_decoder_whole(rule: Rule) -> bool:
    """Whether a rule changes a decomposed decoder and splits it over no ranks, so that one device has it too."""
    return is_of_decoder(rule) and not STRATEGIES[rule.strategy].model_axis


def beyond_decoder(strategies: Sequence[str]) -> tuple[str, ...]:
    """Return the strategies that apply to the whole step, or to blocks outside its decoder, if it has a decoder.

    A technique of both strata and blocks applies to blocks only if it would conflict with another one on the strata.
    """

    def conflicts_alone(name: str) -> bool:
        others = [other for other in strategies if other != name]
        return any(conflicts(strategies)) and not any(conflicts(others))

    own = [name for name in strategies if name in PREDICTIONS]
    return tuple(name for name in own if STRATEGIES[name].choice is None or conflicts_alone(name))


def label(strategy: str) -> str:
    """Return an id with its title ("S4 key-first decode"), or the title alone if it has the id ("fused attention")."""
    if strategy not in STRATEGIES:
        # a plan from another process may have strategies that are not registered in this one
        return f"{strategy} (not registered here)"
    title = STRATEGIES[strategy].title
    return title if strategy in title.split() else f"{strategy} {title}"


def without_blocks(strategies: Iterable[str], specs: Iterable[Spec]) -> list[str]:
    """Leave out strategies of both strata and blocks that are requested for blocks: they restrict no decoder choice."""
    kinds = set(map(type, specs))

    def is_for_blocks(row: Technique) -> bool:
        found = [row.installers[kind] for kind in row.specs if kind in kinds and kind in row.installers]
        return row.choice is not None and bool(found) and all(installer.on_blocks for installer in found)

    # a plan from another process may have strategies that are not registered in this one
    return [name for name in strategies if name not in STRATEGIES or not is_for_blocks(STRATEGIES[name])]


def in_order(strategies: Iterable[str]) -> tuple[str, ...]:
    """Sort ids by the order of installation, without duplicates; S2 comes before S4 (Section 3.4.6)."""
    return tuple(sorted(set(strategies), key=list(STRATEGIES).index))


def rules_in_order(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """Sort rules by the order of installation of their strategies; those of one strategy keep their order."""
    return tuple(sorted(rules, key=lambda rule: list(STRATEGIES).index(rule.strategy)))


def conflicts(strategies: Collection[str]) -> Iterator[str]:
    """Yield one sentence for every pair of strategies that cannot be combined."""
    for one in in_order(strategy for strategy in strategies if strategy in STRATEGIES):
        for other, why in STRATEGIES[one].conflicts.items():
            if other in strategies:
                yield f"{' and '.join(in_order((one, other)))} cannot be together: {why}"
    rows = {name: row for name, row in STRATEGIES.items() if name in strategies}
    # techniques that change decoders only, not blocks of other modules
    for one in (name for name, row in rows.items() if row.choice is not None and name not in OF_BLOCKS):
        for other, row in rows.items():
            if row.no_decoder:
                yield f"{one} and {other} cannot be together: {row.no_decoder}"


def parse_strategies(strategies: str | list[str] | tuple[str, ...]) -> tuple[str, ...]:
    """Parse strategy ids, given as a list or as "S1,S3"; returns them sorted, without duplicates, and always with S1.

    Raises:
        PlanError: An id is not in the library, or cannot be combined with a technique that replaces steps.
    """
    if not isinstance(strategies, str | list | tuple):
        raise PlanError(
            f"strategies={strategies!r} is not supported; allowed is a list such as ['S1', 'S3'], or 'S1,S3'"
        )
    parts = strategies.split(",") if isinstance(strategies, str) else list(strategies)
    known = {strategy.lower(): strategy for strategy in STRATEGIES}
    texts = [str(part).strip() for part in parts if str(part).strip()]
    ids = [known.get(text.lower(), text) for text in texts]
    unknown = [i for i in ids if i not in STRATEGIES]
    if unknown or not ids:
        raise PlanError(
            f"strategies={strategies!r} is not supported: {unknown or 'nothing'!r} is not in the library; allowed"
            f" are {', '.join(STRATEGIES)}, as a list or separated by commas"
        )
    found = in_order({"S1", *ids})
    refuse_combinations(found)
    return found


def technique_of_steps(strategies: Iterable[str]) -> str:
    """Return the strategy that replaces the module's steps; "" if there is none."""
    return next((name for name in strategies if name in STRATEGIES and STRATEGIES[name].steps), "")


def works_with(name: str) -> tuple[str, ...]:
    """Return the strategies that can be combined with `name`, which replaces steps."""
    in_any = (other for other, row in STRATEGIES.items() if row.works_in_any_steps)
    return in_order({*own_steps(name).works_with, *in_any})


def why_not_with(name: str, other: str) -> str:
    """Return why `other` cannot be combined with `name`, which replaces steps, and what to do instead."""
    reasons, others = own_steps(name).not_with, [one for one in works_with(name) if one != "S1"]
    less = f"with {' and '.join(others)}, and with more ranks of the model axis (model_parallel_size)"
    less = f"a rank holds less {less if others else 'on more ranks'}"
    return reasons.get(other, f"it is not supported together with {name}; {{less}}").replace("{less}", less)


def own_steps(name: str) -> OwnSteps:
    """Return the steps of a technique that replaces those of a module."""
    found = STRATEGIES[name].steps
    assert found is not None, f"{name} replaces steps"
    return found


def refuse_combinations(strategies: Iterable[str]) -> None:
    """Raise a PlanError if one of the strategies replaces steps and another cannot be combined with it."""
    chosen = tuple(strategies)
    name = technique_of_steps(chosen)
    for other in chosen if name else ():
        if other != name and other not in works_with(name):
            raise PlanError(
                f"{other} and {name} cannot be together: {why_not_with(name, other)}. Leave one of them out"
            )


def requested_specs(strategies: Iterable[str], request: Any) -> dict[str, Spec]:
    """Return the specs of the strategies that have options, with the options of a request.

    Args:
        strategies: Ids.
        request: Object with options as attributes; a missing attribute means that the option is not set.

    Raises:
        PlanError: The value of an option is not allowed.
    """
    rows = {name: STRATEGIES[name] for name in strategies}
    return {name: row.options(row.specs[0](), request)[0] for name, row in rows.items() if row.options is not None}


def options_of_techniques() -> dict[str, tuple[str, ...]]:
    """Options of AMPStrategy that configure techniques: names of the techniques by option."""
    found = dict[str, tuple[str, ...]]()
    for name, row in STRATEGIES.items():
        for option in row.option_names:
            found[option] = (*found.get(option, ()), name)
    return found


def specs_by_name() -> dict[str, type[Spec]]:
    """Types of all specs, by their name in a plan's JSON."""
    return {spec.__name__: spec for info in STRATEGIES.values() for spec in info.specs}


def targets_of(strategy: str, shape: ModelShape) -> Sequence[Target]:
    """Return what a strategy changes in a model, and check the result of registered functions.

    Raises:
        PlanError: The function did not return pairs of a name and a spec of this strategy, or JSON cannot hold a spec.
    """
    info = STRATEGIES[strategy]
    found = [] if info.targets is None else list(info.targets(shape))
    for target in found:
        fqn, spec = target if isinstance(target, tuple) and len(target) == 2 else (None, None)
        # "" is the root module, which a registered technique cannot replace
        named = isinstance(fqn, str) and bool(fqn or info.data_axis or info.steps)
        if not named or type(spec) not in info.specs:
            raise PlanError(
                f"targets of {strategy} returned {target!r}; allowed are pairs of a module's name or pattern and a"
                f" {' or '.join(kind.__name__ for kind in info.specs)}"
            )
        if not all(isinstance(value, bool | int | float | str | None) for value in asdict(spec).values()):
            raise PlanError(
                f"targets of {strategy} returned {spec!r}; a plan is kept as JSON, so the fields of a spec may be"
                " numbers, texts, booleans or None"
            )
    return found
