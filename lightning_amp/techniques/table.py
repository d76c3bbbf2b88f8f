"""The strategy library in the order of installation: AMP's five, ours, then those registered from outside.

S1 to S5 and their signals are those of Zhang et al. 2026, Table 4. All that planning knows of a strategy stands in its
row of `STRATEGIES`, which cannot be together in `CONFLICTS`; how a policy reads the signals is in `policies/paper.py`,
how a spec is installed in `installing/install.py`.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from lightning_amp.diagnosis.diagnose import ATTENTION_DECODER, HEAVY_DECOMPOSITION, HIGH_INPUT_DIMENSIONALITY
from lightning_amp.errors import PlanError
from lightning_amp.techniques import specs
from lightning_amp.techniques.hic.block_sizes import block_cells, chunk_buckets
from lightning_amp.techniques.specs import Spec
from lightning_amp.techniques.logits.row import ROW as LOGITS
from lightning_amp.techniques.replay.row import ROW as REPLAY
from lightning_amp.techniques.sequence.row import ROW as SEQUENCE
from lightning_amp.techniques.tensor3d.row import ROW as TENSOR3D

if TYPE_CHECKING:
    from lightning_amp.costs.model_shape import DecoderShape, ModelShape

Target = tuple[str, Spec]


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyInfo:
    """One strategy.

    Attributes:
        shrinks: The tensor that it makes smaller.
        specs: What its rules may ask for.
        targets: Shape of the model -> names or patterns of the modules to change, and what to install there; None
            for S1, whose rules follow from the mesh.
        signal: The signal that asks for it, None when only a person does.
        choice: Its choice on an axis of the decoder (`Axes`); a strategy with one needs a decomposed decoder.
        model_axis: Whether it splits a module over the model axis of the mesh.
        data_axis: Whether it splits parameters over the data axis; the Lightning strategy itself carries it out.
        install: Technique of a strategy from outside: (module, spec, mesh) -> Change or module. None for S1 to S5,
            whose techniques `installing/install.py` knows.
        steps: Module whose `install(module, spec, mesh)` gives what takes the place of a LightningModule's steps, by
            name: a technique that lies in one folder, and that the Lightning strategy carries out. Gradients of its
            steps are averaged over the model axis too, unless its `split_parameters` gives what splits and reduces
            them. "" for all others.
        together: Of such a technique: the strategies that it goes together with.
        apart: Of such a technique: why others do not, and what to do instead; those that it does not name have a
            general reason.
        asked: Of such a technique: its spec with the options that a person has given, and whether they say all of it.
        without_step: Of such a technique: what to do where the first step cannot be counted.
        shape_after: Of a strategy from outside: shape of the model and ranks of the model axis -> shape that the
            memory model is to see instead; None leaves its savings out.
    """

    title: str
    shrinks: str
    specs: tuple[type[Spec], ...]
    targets: "Callable[[ModelShape], Iterable[Target]] | None" = None
    signal: str | None = None
    choice: tuple[str, str] | None = None
    model_axis: bool = False
    data_axis: bool = False
    install: Callable[..., Any] | None = None
    steps: str = ""
    together: tuple[str, ...] = ()
    apart: Mapping[str, str] = field(default_factory=dict)
    asked: "Callable[[Any, Any], tuple[Spec, bool]] | None" = None
    without_step: str = ""
    shape_after: "Callable[[ModelShape, int], ModelShape] | None" = None

    @property
    def from_outside(self) -> bool:
        """Whether it was registered, and is not of the paper."""
        return self.install is not None


def _on_decoder(
    spec_of: "Callable[[DecoderShape], Spec]", leaf: str = ""
) -> "Callable[[ModelShape], list[Target]]":
    """Targets of a strategy that changes the decoder, or the same leaf of each of its strata."""

    def targets(shape: "ModelShape") -> list[Target]:
        assert shape.decoder is not None, "the policy has checked that there is a decoder"
        return [(shape.decoder.fqn + (leaf and f".strata.*.{leaf}"), spec_of(shape.decoder))]

    return targets


def _feature_parallel(shape: "ModelShape") -> list[Target]:
    layers: list[Target] = [(fqn, specs.RowParallelLinear()) for fqn in shape.wide_layers]
    return [*_on_decoder(lambda _: specs.FeatureParallel())(shape), *layers]


def _domain_parallel(shape: "ModelShape") -> list[Target]:
    vertices = shape.vertices
    found = _on_decoder(lambda _: specs.DomainParallel(vertices=vertices is not None))(shape)
    if vertices is None or shape.decoder is None:
        return found
    spec = specs.VertexParallel(modality=vertices.modality, window=shape.decoder.window)
    return [*found, (vertices.fqn, spec)]


def _pipeline_stages(shape: "ModelShape") -> list[Target]:
    # the stages depend on the mesh: see time/fill_settings.py
    return [] if shape.block_list is None else [(shape.block_list[0], specs.PipelineStages(ends=""))]


STRATEGIES: dict[str, StrategyInfo] = {
    "S1": StrategyInfo(
        title="data parallel",
        shrinks="cells per rank",
        specs=(specs.DataParallel, specs.ShareBatchStatistics, specs.BalanceCells),
    ),
    "S2": StrategyInfo(
        title="feature parallel",
        shrinks="[B, F] to [B, F / R]",
        specs=(specs.FeatureParallel, specs.RowParallelLinear),
        targets=_feature_parallel,
        signal=HIGH_INPUT_DIMENSIONALITY,
        choice=("features", "sharded"),
        model_axis=True,
    ),
    "S3": StrategyInfo(
        title="chunked attention",
        shrinks="[N, 3 w] to [C, 3 w]",
        specs=(specs.ChunkedAttention,),
        targets=_on_decoder(
            lambda d: specs.ChunkedAttention(buckets=chunk_buckets(d.window)), "key.attention"
        ),
        signal=ATTENTION_DECODER,
        choice=("attention", "chunked"),
    ),
    "S4": StrategyInfo(
        title="key-first decode",
        shrinks="[B, N] to [B, F_k]",
        specs=(specs.KeyFirstDecode,),
        targets=_on_decoder(lambda _: specs.KeyFirstDecode(), "decode"),
        signal=HIGH_INPUT_DIMENSIONALITY,
        choice=("decode", "key-first"),
    ),
    "S5": StrategyInfo(
        title="hidden-dimension parallel",
        shrinks="[N, D] to [N, D / R]",
        specs=(specs.HiddenParallel,),
        targets=_on_decoder(lambda _: specs.HiddenParallel()),
        signal=HEAVY_DECOMPOSITION,
        choice=("placement", "hidden"),
        model_axis=True,
    ),
    "fused": StrategyInfo(
        title="fused attention",
        shrinks="[N, 3 w] to [C, 3 w], and all copies of keys and values",
        specs=(specs.FusedAttention,),
        targets=_on_decoder(lambda _: specs.FusedAttention(), "key.attention"),
        choice=("attention", "fused"),
    ),
    "sdpa": StrategyInfo(
        title="sdpa attention",
        shrinks="[N, 3 w] to nothing, in torch's fused kernels",
        specs=(specs.SdpaAttention,),
        targets=_on_decoder(lambda _: specs.SdpaAttention(), "key.attention"),
        choice=("attention", "sdpa"),
    ),
    "sparse": StrategyInfo(
        title="sparse likelihood",
        shrinks="tensors [B, F_k] of the likelihood to its gradients",
        specs=(specs.SparseLikelihood,),
        targets=_on_decoder(lambda _: specs.SparseLikelihood(), "likelihood"),
        choice=("likelihood", "sparse"),
    ),
    "nodes": StrategyInfo(
        title="domain parallel over nodes",
        shrinks="[N, D] and [V, D] to those of a rank",
        specs=(specs.DomainParallel, specs.VertexParallel),
        targets=_domain_parallel,
        choice=("placement", "nodes"),
        model_axis=True,
    ),
    "recompute": StrategyInfo(
        title="recompute",
        shrinks="K strata to one, or a block to its inputs, computed twice",
        specs=(specs.RecomputeStrata, specs.RecomputeBlock),
        targets=_on_decoder(lambda _: specs.RecomputeStrata()),
        choice=("activations", "recompute"),
    ),
    "stream": StrategyInfo(
        title="stream strata",
        shrinks="K strata to one, computed once",
        specs=(specs.StreamStrata,),
        targets=_on_decoder(
            lambda d: specs.StreamStrata(
                cells=block_cells(max(d.features), anchors=d.anchors, launched=d.launched)
            )
        ),
        choice=("activations", "stream"),
    ),
    "compile": StrategyInfo(
        title="compile strata",
        shrinks="kernels of a stratum, by torch.compile",
        specs=(specs.CompileStrata,),
        targets=_on_decoder(lambda _: specs.CompileStrata()),
        choice=("kernels", "compiled"),
    ),
    "strata": StrategyInfo(
        title="strata parallel",
        shrinks="K strata to those of a rank",
        specs=(specs.StrataParallel,),
        # the ranks' runs depend on the mesh and on the other choices: see time/fill_settings.py
        targets=_on_decoder(lambda _: specs.StrataParallel(ends="")),
        choice=("placement", "strata"),
        model_axis=True,
    ),
    "pipeline": StrategyInfo(
        title="pipeline of stages",
        shrinks="K blocks to those of a rank",
        specs=(specs.PipelineStages,),
        targets=_pipeline_stages,
        model_axis=True,
    ),
    "fsdp": StrategyInfo(
        title="fully sharded data parallel",
        shrinks="parameters, gradients and optimiser state to those of a rank",
        specs=(specs.FullyShard,),
        targets=lambda shape: [(fqn, specs.FullyShard()) for fqn in (*shape.blocks, "")],
        data_axis=True,
    ),
    "chunk": StrategyInfo(
        title="chunk",
        shrinks="inner tensors of a block to those of one chunk",
        specs=(specs.ChunkBlock,),
    ),
    "logits": StrategyInfo(**LOGITS),
    "replay": StrategyInfo(**REPLAY),
    "sequence": StrategyInfo(**SEQUENCE),
    "tensor3d": StrategyInfo(**TENSOR3D),
}

ONE_PLACEMENT = "both split the decoder over the model axis, which has room for one placement"
COLLECTIVES_INSIDE = "ranks send parts of a stratum while it is computed, which compile does not look into"
ONE_ATTENTION = "both say how attention is computed"

ONLY_WITHOUT_DECODER = (
    "fsdp gathers what a forward needs when it is called, and a decomposed decoder's strata are run in parts"
)

CONFLICTS: tuple[tuple[str, str, str], ...] = (
    ("S3", "fused", "both say how attention is computed; fused needs less memory and is faster"),
    ("S3", "sdpa", ONE_ATTENTION),
    ("S3", "recompute", "chunks keep what they are computed from; use stream, or fused"),
    ("S5", "fused", "under S5 the scores are sums over the ranks, which fused attention never holds; use S3"),
    ("S5", "sdpa", "under S5 the scores are sums over the ranks, which torch's kernels keep; use S3"),
    ("S2", "compile", COLLECTIVES_INSIDE),
    ("S5", "compile", COLLECTIVES_INSIDE),
    ("nodes", "compile", COLLECTIVES_INSIDE),
    ("S5", "strata", ONE_PLACEMENT),
    ("S5", "nodes", ONE_PLACEMENT),
    ("fused", "sdpa", ONE_ATTENTION),
    ("nodes", "strata", ONE_PLACEMENT),
    (
        "recompute",
        "stream",
        "both say what is kept of a stratum; stream keeps as little and computes it once",
    ),
    *(
        (strategy, "fsdp", ONLY_WITHOUT_DECODER)
        for strategy, row in STRATEGIES.items()
        # blocks of a module without decoder can be recomputed
        if row.choice is not None and strategy != "recompute"
    ),
)
"""Pairs, in the order of the library."""


def label(strategy: str) -> str:
    """An id with its title: "S4 key-first decode", and "fused attention" where the title says the id."""
    if strategy not in STRATEGIES:
        # a plan that came from another process may hold strategies that this one has not registered
        return f"{strategy} (not registered here)"
    title = STRATEGIES[strategy].title
    return title if strategy in title.split() else f"{strategy} {title}"


def special_choice(spec: Spec) -> tuple[str, str] | None:
    """The choice on an axis of the decoder of a spec that asks for another form than its strategy's usual one."""
    match spec:
        case specs.ChunkedAttention(retain=True):
            return "attention", "chunked-retained"
        case specs.HiddenParallel(gather=True):
            return "placement", "hidden-gathered"
    return None


def without_blocks(strategies: Iterable[str], asked: Iterable[Spec]) -> list[str]:
    """Strategies but recompute, if it is asked for blocks alone: they may run again beside any choice of a decoder."""
    kinds = set(map(type, asked))
    blocks_alone = specs.RecomputeBlock in kinds and specs.RecomputeStrata not in kinds
    return [strategy for strategy in strategies if strategy != "recompute" or not blocks_alone]


def of_blocks_alone(strategies: Sequence[str]) -> bool:
    """Whether recompute, beside a decoder, is of blocks outside of it: others say what is kept of its strata."""
    others = [strategy for strategy in strategies if strategy != "recompute"]
    return len(others) < len(strategies) and any(conflicts(strategies)) and not any(conflicts(others))


def in_order(strategies: Iterable[str]) -> tuple[str, ...]:
    """Ids in the order of the library, each once: that of installation, in which S2 comes before S4 (Section 3.4.6)."""
    return tuple(sorted(set(strategies), key=list(STRATEGIES).index))


def conflicts(strategies: Collection[str]) -> Iterator[str]:
    """One sentence for every pair of the strategies that cannot be together."""
    for one, other, why in CONFLICTS:
        if one in strategies and other in strategies:
            yield f"{one} and {other} cannot be together: {why}"


def parse_strategies(asked: str | list[str] | tuple[str, ...]) -> tuple[str, ...]:
    """Read a list of strategy ids, given as a list or as "S1,S3"; sorted, each once, S1 always included.

    Raises:
        PlanError: An id that is not in the library, or one that does not go together with a technique of steps.
    """
    if not isinstance(asked, str | list | tuple):
        raise PlanError(
            f"strategies={asked!r} is not supported; allowed is a list such as ['S1', 'S3'], or 'S1,S3'"
        )
    parts = asked.split(",") if isinstance(asked, str) else list(asked)
    known = {strategy.lower(): strategy for strategy in STRATEGIES}
    texts = [str(part).strip() for part in parts if str(part).strip()]
    ids = [known.get(text.lower(), text) for text in texts]
    unknown = [i for i in ids if i not in STRATEGIES]
    if unknown or not ids:
        raise PlanError(
            f"strategies={asked!r} was asked for, {unknown or 'nothing'!r} is not in the library; allowed are"
            f" {', '.join(STRATEGIES)}, as a list or separated by commas"
        )
    found = in_order({"S1", *ids})
    refuse_apart(found)
    return found


def with_steps(strategies: Iterable[str]) -> str:
    """The strategy whose steps take the place of the module's; "" where none is among them."""
    return next((name for name in strategies if name in STRATEGIES and STRATEGIES[name].steps), "")


def not_together(name: str, other: str) -> str:
    """Why a strategy does not go together with `name`, which has steps, and what to do instead."""
    row = STRATEGIES[name]
    others = [one for one in row.together if one != "S1"]
    less = f"with {' and '.join(others)}, and with more ranks of the model axis (model_parallel_size)"
    return row.apart.get(other) or (
        f"it is not supported together with {name}; a rank holds less {less if others else 'on more ranks'}"
    )


def refuse_apart(strategies: Iterable[str]) -> None:
    """Refuse, with a PlanError, what does not go together with a strategy that has steps."""
    chosen = tuple(strategies)
    name = with_steps(chosen)
    for other in chosen if name else ():
        if other != name and other not in STRATEGIES[name].together:
            raise PlanError(
                f"{other} and {name} cannot be together: {not_together(name, other)}. Leave one of them out"
            )


def specs_by_name() -> dict[str, type[Spec]]:
    """Types of all specs by the name that stands in a plan's JSON."""
    return {spec.__name__: spec for info in STRATEGIES.values() for spec in info.specs}


def targets_of(strategy: str, shape: "ModelShape") -> Sequence[Target]:
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
