"""The strategy library in the order of installation: AMP's five, ours, then those registered from outside.

    signal                      strategy    asks for
    (always)                    S1          DataParallel, ShareBatchStatistics, BalanceCells
    HIGH_INPUT_DIMENSIONALITY   S2          FeatureParallel, RowParallelLinear
    ATTENTION_DECODER           S3          ChunkedAttention
    HIGH_INPUT_DIMENSIONALITY   S4          KeyFirstDecode
    HEAVY_DECOMPOSITION         S5          HiddenParallel
    none: chosen by cost        fused       FusedAttention
                                sparse      SparseLikelihood
                                nodes       DomainParallel, VertexParallel
                                recompute   RecomputeStrata
                                stream      StreamStrata
                                strata      StrataParallel

S1 to S5 and their signals are those of Zhang et al. 2026, Table 4. All that planning knows of a strategy stands in its
row of `STRATEGIES`, which cannot be together in `conflicts.py`; how a policy reads the signals is in
`policies/make_plan.py`, how a spec is installed in `parallel/install.py`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from lightning_amp.diagnosis.diagnose import ATTENTION_DECODER, HEAVY_DECOMPOSITION, HIGH_INPUT_DIMENSIONALITY
from lightning_amp.errors import PlanError
from lightning_amp.planning.plan.block_sizes import block_cells, chunk_buckets
from lightning_amp.planning.plan.specs import (
    BalanceCells,
    ChunkedAttention,
    DataParallel,
    DomainParallel,
    FeatureParallel,
    FusedAttention,
    HiddenParallel,
    KeyFirstDecode,
    RecomputeStrata,
    RowParallelLinear,
    ShareBatchStatistics,
    SparseLikelihood,
    Spec,
    StrataParallel,
    StreamStrata,
    VertexParallel,
)

if TYPE_CHECKING:
    from lightning_amp.planning.plan.model_shape import DecoderShape, ModelShape

Target = tuple[str, Spec]


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyInfo:
    """One strategy.

    Attributes:
        title: What it does, in a few words.
        shrinks: The tensor that it makes smaller.
        specs: What its rules may ask for.
        targets: Shape of the model -> names or patterns of the modules to change, and what to install there; None
            for S1, whose rules follow from the mesh alone.
        signal: The signal that asks for it, None when only a person does.
        choice: Its choice on an axis of the decoder (`Axes`); a strategy with one needs a decomposed decoder.
        model_axis: Whether it splits a module over the model axis of the mesh.
        install: Technique of a strategy from outside: (module, spec, mesh) -> Change or module. None for S1 to S5,
            whose techniques `parallel/install.py` knows.
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
    install: Callable[..., Any] | None = None
    shape_after: "Callable[[ModelShape, int], ModelShape] | None" = None

    @property
    def from_outside(self) -> bool:
        """Whether it was registered, and is not of the paper."""
        return self.install is not None


def _decoder(shape: "ModelShape") -> "DecoderShape":
    assert shape.decoder is not None, "a strategy with a choice needs a decoder, which the policy has checked"
    return shape.decoder


def _feature_parallel(shape: "ModelShape") -> list[Target]:
    layers: list[Target] = [(fqn, RowParallelLinear()) for fqn in shape.wide_layers]
    return [(_decoder(shape).fqn, FeatureParallel()), *layers]


def _chunked_attention(shape: "ModelShape") -> list[Target]:
    decoder = _decoder(shape)
    spec = ChunkedAttention(buckets=chunk_buckets(decoder.window))
    return [(f"{decoder.fqn}.strata.*.key.attention", spec)]


def _key_first(shape: "ModelShape") -> list[Target]:
    return [(f"{_decoder(shape).fqn}.strata.*.decode", KeyFirstDecode())]


def _fused_attention(shape: "ModelShape") -> list[Target]:
    return [(f"{_decoder(shape).fqn}.strata.*.key.attention", FusedAttention())]


def _sparse_likelihood(shape: "ModelShape") -> list[Target]:
    return [(f"{_decoder(shape).fqn}.strata.*.likelihood", SparseLikelihood())]


def _domain_parallel(shape: "ModelShape") -> list[Target]:
    decoder, vertices = _decoder(shape), shape.vertices
    anchors: Target = (decoder.fqn, DomainParallel(vertices=vertices is not None))
    if vertices is None:
        return [anchors]
    return [anchors, (vertices.fqn, VertexParallel(modality=vertices.modality, window=decoder.window))]


def _recompute(shape: "ModelShape") -> list[Target]:
    return [(_decoder(shape).fqn, RecomputeStrata())]


def _stream(shape: "ModelShape") -> list[Target]:
    decoder = _decoder(shape)
    spec = StreamStrata(cells=block_cells(max(decoder.features), anchors=decoder.anchors))
    return [(decoder.fqn, spec)]


def _strata_parallel(shape: "ModelShape") -> list[Target]:
    # the ranks' runs depend on the mesh and on the other choices: see time/fill_settings.py
    return [(_decoder(shape).fqn, StrataParallel(ends=""))]


def _hidden_parallel(shape: "ModelShape") -> list[Target]:
    return [(_decoder(shape).fqn, HiddenParallel())]


STRATEGIES: dict[str, StrategyInfo] = {
    "S1": StrategyInfo(
        title="data parallel",
        shrinks="cells per rank",
        specs=(DataParallel, ShareBatchStatistics, BalanceCells),
    ),
    "S2": StrategyInfo(
        title="feature parallel",
        shrinks="[B, F] to [B, F / R]",
        specs=(FeatureParallel, RowParallelLinear),
        targets=_feature_parallel,
        signal=HIGH_INPUT_DIMENSIONALITY,
        choice=("features", "sharded"),
        model_axis=True,
    ),
    "S3": StrategyInfo(
        title="chunked attention",
        shrinks="[N, 3 w] to [C, 3 w]",
        specs=(ChunkedAttention,),
        targets=_chunked_attention,
        signal=ATTENTION_DECODER,
        choice=("attention", "chunked"),
    ),
    "S4": StrategyInfo(
        title="key-first decode",
        shrinks="[B, N] to [B, F_k]",
        specs=(KeyFirstDecode,),
        targets=_key_first,
        signal=HIGH_INPUT_DIMENSIONALITY,
        choice=("decode", "key-first"),
    ),
    "S5": StrategyInfo(
        title="hidden-dimension parallel",
        shrinks="[N, D] to [N, D / R]",
        specs=(HiddenParallel,),
        targets=_hidden_parallel,
        signal=HEAVY_DECOMPOSITION,
        choice=("placement", "hidden"),
        model_axis=True,
    ),
    "fused": StrategyInfo(
        title="fused attention",
        shrinks="[N, 3 w] to [C, 3 w], and all copies of keys and values",
        specs=(FusedAttention,),
        targets=_fused_attention,
        choice=("attention", "fused"),
    ),
    "sparse": StrategyInfo(
        title="sparse likelihood",
        shrinks="tensors [B, F_k] of the likelihood to its gradients",
        specs=(SparseLikelihood,),
        targets=_sparse_likelihood,
        choice=("likelihood", "sparse"),
    ),
    "nodes": StrategyInfo(
        title="domain parallel over nodes",
        shrinks="[N, D] and [V, D] to those of a rank",
        specs=(DomainParallel, VertexParallel),
        targets=_domain_parallel,
        choice=("placement", "nodes"),
        model_axis=True,
    ),
    "recompute": StrategyInfo(
        title="recompute strata",
        shrinks="K strata to one, computed twice",
        specs=(RecomputeStrata,),
        targets=_recompute,
        choice=("activations", "recompute"),
    ),
    "stream": StrategyInfo(
        title="stream strata",
        shrinks="K strata to one, computed once",
        specs=(StreamStrata,),
        targets=_stream,
        choice=("activations", "stream"),
    ),
    "strata": StrategyInfo(
        title="strata parallel",
        shrinks="K strata to those of a rank",
        specs=(StrataParallel,),
        targets=_strata_parallel,
        choice=("placement", "strata"),
        model_axis=True,
    ),
}


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
        case ChunkedAttention(retain=True):
            return "attention", "chunked-retained"
        case HiddenParallel(gather=True):
            return "placement", "hidden-gathered"
    return None


def in_order(strategies: Iterable[str]) -> tuple[str, ...]:
    """Ids in the order of the library, each once: that of installation, in which S2 comes before S4 (Section 3.4.6)."""
    return tuple(sorted(set(strategies), key=list(STRATEGIES).index))


def parse_strategies(asked: str | list[str] | tuple[str, ...]) -> tuple[str, ...]:
    """Read a list of strategy ids, given as a list or as "S1,S3"; sorted, each once, S1 always included.

    Raises:
        PlanError: An id that is not in the library.
    """
    if not isinstance(asked, str | list | tuple):
        raise PlanError(
            f"strategies={asked!r} was asked for; allowed is a list such as ['S1', 'S3'], or 'S1,S3'"
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
    return in_order({"S1", *ids})


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
        if not isinstance(fqn, str) or not fqn or type(spec) not in info.specs:
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
