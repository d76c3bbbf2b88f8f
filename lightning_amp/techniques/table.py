"""List all techniques in the order of installation: AMP's five, ours, then registered ones.

S1 to S5 and their signals are those of Zhang et al. 2026, Table 4. A row has all that planning and installation know
of a technique; it lies in the technique's folder. How policy "paper" reads the signals is in `policies/paper.py`.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import cache
from typing import Any

from lightning_amp.costs.model_shape import ModelShape
from lightning_amp.costs.rule import Rule, Spec
from lightning_amp.errors import PlanError
from lightning_amp.techniques.chunk.row import ROW as CHUNK
from lightning_amp.techniques.data.row import ROW as S1
from lightning_amp.techniques.fsdp.row import ROW as FSDP
from lightning_amp.techniques.hic.rows import COMPILE, FUSED, NODES, S2, S3, S4, S5, SDPA, SPARSE, STRATA, STREAM
from lightning_amp.techniques.logits.row import ROW as LOGITS
from lightning_amp.techniques.pipeline.row import ROW as PIPELINE
from lightning_amp.techniques.recompute.row import ROW as RECOMPUTE
from lightning_amp.techniques.replay.row import ROW as REPLAY
from lightning_amp.techniques.sequence.row import ROW as SEQUENCE
from lightning_amp.techniques.stage_search import StageSearch
from lightning_amp.techniques.technique import Installer, Prediction, Target, Technique, function_at
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
    "logits": LOGITS,
    "replay": REPLAY,
    "sequence": SEQUENCE,
    "tensor3d": TENSOR3D,
}
PREDICTIONS: dict[str, Prediction] = dict(
    sorted(
        ((name, row.prediction) for name, row in STRATEGIES.items() if row.prediction is not None),
        key=lambda item: item[1].turn,
    )
)
"""Of techniques that the step of any module may be planned with, in the order in which a draft gets them."""
OF_BLOCKS = tuple(
    name for name in PREDICTIONS if any(installer.on_blocks for installer in STRATEGIES[name].installers.values())
)
"""Those of them whose rules name blocks."""
STAGED = next(name for name, row in STRATEGIES.items() if row.search)
"""The technique whose stages the planner cuts."""
EVALUATED, evaluated_within = next(
    (name, row.evaluation) for name, row in STRATEGIES.items() if row.evaluation is not None
)
"""The technique by which steps without gradients are held within a budget, and its spec for some bytes."""


@cache
def stage_search() -> StageSearch:
    """How the planner finds stages."""
    # loaded when it is used: the search needs the whole table of its technique, and numpy
    found: object = function_at(STRATEGIES[STAGED].search)
    assert isinstance(found, StageSearch), "the row names one"
    return found


def installer_of(spec: type[Spec]) -> Installer | None:
    """How a type of spec is installed; None for what the Lightning strategy carries out by itself."""
    return next((row.installers[spec] for row in STRATEGIES.values() if spec in row.installers), None)


def is_of_block(rule: Rule) -> bool:
    """Whether a rule names a block of any module, and no decoder."""
    found = installer_of(type(rule.spec))
    return found is not None and found.on_blocks


def on_axis(*axes: str) -> tuple[str, ...]:
    """Techniques that are a choice on one of some axes of the decoder."""
    return tuple(name for name, row in STRATEGIES.items() if row.choice is not None and row.choice[0] in axes)


def of_blocks_outside(strategies: Sequence[str]) -> frozenset[str]:
    """Those of the strategies that, if there is a decoder, are of blocks outside of it.

    A technique of strata and of blocks is of blocks alone where another one already says what is kept of the strata.
    """

    def is_apart(name: str) -> bool:
        others = [other for other in strategies if other != name]
        return any(conflicts(strategies)) and not any(conflicts(others))

    own = [name for name in strategies if name in OF_BLOCKS]
    return frozenset(name for name in own if STRATEGIES[name].choice is None or is_apart(name))


def label(strategy: str) -> str:
    """An id with its title: "S4 key-first decode", and "fused attention" where the title says the id."""
    if strategy not in STRATEGIES:
        # a plan that came from another process may hold strategies that this one has not registered
        return f"{strategy} (not registered here)"
    title = STRATEGIES[strategy].title
    return title if strategy in title.split() else f"{strategy} {title}"


def without_blocks(strategies: Iterable[str], asked: Iterable[Spec]) -> list[str]:
    """Strategies but those of strata and blocks that are requested for blocks: any choice of a decoder has them."""
    kinds = set(map(type, asked))

    def is_for_blocks(row: Technique) -> bool:
        found = [row.installers[kind] for kind in row.specs if kind in kinds and kind in row.installers]
        return row.choice is not None and bool(found) and all(installer.on_blocks for installer in found)

    # a plan that came from another process may hold strategies that this one has not registered
    return [name for name in strategies if name not in STRATEGIES or not is_for_blocks(STRATEGIES[name])]


def in_order(strategies: Iterable[str]) -> tuple[str, ...]:
    """Ids in the order of the library, each once: that of installation, in which S2 comes before S4 (Section 3.4.6)."""
    return tuple(sorted(set(strategies), key=list(STRATEGIES).index))


def conflicts(strategies: Collection[str]) -> Iterator[str]:
    """One sentence for every pair of the strategies that cannot be together."""
    for one in in_order(strategy for strategy in strategies if strategy in STRATEGIES):
        for other, why in STRATEGIES[one].conflicts.items():
            if other in strategies:
                yield f"{' and '.join(in_order((one, other)))} cannot be together: {why}"
    rows = {name: row for name, row in STRATEGIES.items() if name in strategies}
    # those that change decoders only, and no blocks of other modules
    for one in (name for name, row in rows.items() if row.choice is not None and name not in OF_BLOCKS):
        for other, row in rows.items():
            if row.no_decoder:
                yield f"{one} and {other} cannot be together: {row.no_decoder}"


def parse_strategies(asked: str | list[str] | tuple[str, ...]) -> tuple[str, ...]:
    """Read a list of strategy ids, given as a list or as "S1,S3"; sorted, each once, S1 always included.

    Raises:
        PlanError: An id that is not in the library, or one that does not go together with a technique of steps.
    """
    if not isinstance(asked, str | list | tuple):
        raise PlanError(f"strategies={asked!r} is not supported; allowed is a list such as ['S1', 'S3'], or 'S1,S3'")
    parts = asked.split(",") if isinstance(asked, str) else list(asked)
    known = {strategy.lower(): strategy for strategy in STRATEGIES}
    texts = [str(part).strip() for part in parts if str(part).strip()]
    ids = [known.get(text.lower(), text) for text in texts]
    unknown = [i for i in ids if i not in STRATEGIES]
    if unknown or not ids:
        raise PlanError(
            f"strategies={asked!r} is not supported: {unknown or 'nothing'!r} is not in the library; allowed"
            f" are {', '.join(STRATEGIES)}, as a list or separated by commas"
        )
    found = in_order({"S1", *ids})
    refuse_apart(found)
    return found


def with_steps(strategies: Iterable[str]) -> str:
    """The strategy whose steps take the place of the module's; "" where none is among them."""
    return next((name for name in strategies if name in STRATEGIES and STRATEGIES[name].steps), "")


def together(name: str) -> tuple[str, ...]:
    """The strategies that one with steps goes together with."""
    return in_order({*STRATEGIES[name].together, *(other for other, row in STRATEGIES.items() if row.in_any_steps)})


def not_together(name: str, other: str) -> str:
    """Why a strategy does not go together with `name`, which has steps, and what to do instead."""
    row, others = STRATEGIES[name], [one for one in together(name) if one != "S1"]
    less = f"with {' and '.join(others)}, and with more ranks of the model axis (model_parallel_size)"
    less = f"a rank holds less {less if others else 'on more ranks'}"
    return row.apart.get(other, f"it is not supported together with {name}; {{less}}").replace("{less}", less)


def refuse_apart(strategies: Iterable[str]) -> None:
    """Refuse, with a PlanError, what does not go together with a strategy that has steps."""
    chosen = tuple(strategies)
    name = with_steps(chosen)
    for other in chosen if name else ():
        if other != name and other not in together(name):
            raise PlanError(
                f"{other} and {name} cannot be together: {not_together(name, other)}. Leave one of them out"
            )


def requested_specs(strategies: Iterable[str], request: Any) -> dict[str, Spec]:
    """The specs of those strategies that have options, with the options of a request.

    Args:
        strategies: Ids.
        request: Has options as attributes; one that is absent was not given.

    Raises:
        PlanError: An option outside what is allowed.
    """
    rows = {name: STRATEGIES[name] for name in strategies}
    return {name: row.options(row.specs[0](), request)[0] for name, row in rows.items() if row.options is not None}


def options_of_techniques() -> dict[str, tuple[str, ...]]:
    """The options of AMPStrategy that say how a strategy is done: by option, the strategies that have it."""
    found = dict[str, tuple[str, ...]]()
    for name, row in STRATEGIES.items():
        for option in row.option_names:
            found[option] = (*found.get(option, ()), name)
    return found


def specs_by_name() -> dict[str, type[Spec]]:
    """Types of all specs by the name that stands in a plan's JSON."""
    return {spec.__name__: spec for info in STRATEGIES.values() for spec in info.specs}


def targets_of(strategy: str, shape: ModelShape) -> Sequence[Target]:
    """What a strategy changes in a model; what a function from outside returned is checked.

    Raises:
        PlanError: Not pairs of a name and a spec of this strategy, or a spec that JSON cannot hold.
    """
    info = STRATEGIES[strategy]
    found = [] if info.targets is None else list(info.targets(shape))
    for target in found:
        fqn, spec = target if isinstance(target, tuple) and len(target) == 2 else (None, None)
        # "" is the whole module, which no technique from outside can replace
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
