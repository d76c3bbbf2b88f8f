"""Put a plan's rules into a module, one after the other in the order of the plan; the first refusal undoes all.

A technique is a function `(module, spec, mesh) -> Change` found by the type of the rule's spec: new modules for the
module itself or for children of it, which own the same parameter objects under the same names (this is checked). A
module by itself stands for the change that puts it in the old one's place. A technique sees what earlier rules have
installed, so techniques stack: S5 finds the attention inside S3's chunks and the decode that S4 left.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate
from types import MethodType
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_amp.errors import InstallError, PlanError
from lightning_amp.footprint.forward_overrides import Override, Position, add_override, remove_override
from lightning_amp.techniques.hic.attention.fused import fuse_attention
from lightning_amp.techniques.hic.attention.s3_chunked import chunk_attention
from lightning_amp.techniques.recompute.recompute import RecomputedForward, recompute_block
from lightning_amp.techniques.chunk.chunk_module import chunk_block
from lightning_amp.techniques.chunk.in_chunks import InChunks
from lightning_amp.techniques.contract.change import Change
from lightning_amp.techniques.contract.check_replacement import check_forwards, check_hooks, check_parameters
from lightning_amp.techniques.contract.protocol import find_decoders, is_decomposed
from lightning_amp.techniques.contract.sharded_parameter import ShardedParameter
from lightning_amp.techniques.contract.stand_in import named_parts, part
from lightning_amp.techniques.hic.nodes.decoder import share_anchors
from lightning_amp.techniques.hic.nodes.graph_encoder import share_vertices
from lightning_amp.techniques.pipeline.blocks import pipeline_stages
from lightning_amp.techniques.hic.features.decoder import share_features
from lightning_amp.techniques.hic.features.wide_linear import share_rows
from lightning_amp.techniques.hic.hidden.decoder import share_hidden
from lightning_amp.techniques.hic.scores.s4_key_first import key_first
from lightning_amp.techniques.hic.scores.sparse_likelihood import sparse_likelihood
from lightning_amp.techniques.hic.strata.compile import compile_strata
from lightning_amp.techniques.hic.strata.recompute import recompute_strata
from lightning_amp.techniques.hic.strata.strata_parallel import share_strata
from lightning_amp.techniques.hic.strata.stream import stream_strata
from lightning_amp.techniques import specs
from lightning_amp.planning.plan.plan import Plan, Rule
from lightning_amp.techniques.table import STRATEGIES
from lightning_amp.techniques.logits.install import chunk_logits
from lightning_amp.techniques.logits.row import ChunkLogits
from lightning_amp.techniques.put_methods import put_methods
from lightning_amp.techniques.replay.install import replay_operators
from lightning_amp.techniques.replay.row import ReplayOperators

Install = Callable[[Any, Any, Any], Change | nn.Module]


@dataclass(frozen=True, slots=True)
class Technique:
    """How a type of spec is installed.

    Attributes:
        install: (module, spec, mesh) -> what changes; the mesh is None where there is one device.
        on_decoder: Whether the rule names a decomposed decoder; else a leaf or a layer, which the technique checks.
        needs_mesh: Whether it splits something over the ranks of the model axis.
    """

    install: Install
    on_decoder: bool = False
    needs_mesh: bool = False


BY_STRATEGY = (
    *STRATEGIES["S1"].specs,
    *(spec for row in STRATEGIES.values() if row.data_axis or row.steps for spec in row.specs),
)
"""Carried out by the Lightning strategy itself: gradients, batch statistics, the sampler, parameters that are split
over the data axis, and steps that take the place of the module's; not a module swap."""

OF_BLOCKS = (specs.RecomputeBlock, specs.ChunkBlock)
"""For blocks of any module, outside of a decoder where there is one."""

AROUND = (*OF_BLOCKS, specs.PipelineStages)
"""What is installed last, whatever the order of the plan: it runs modules that others have replaced by then."""

TECHNIQUES: dict[type, Technique] = {
    specs.ChunkedAttention: Technique(
        lambda m, spec, mesh: chunk_attention(m, buckets=spec.buckets, retain=spec.retain)
    ),
    specs.KeyFirstDecode: Technique(lambda m, spec, mesh: key_first(m)),
    specs.FusedAttention: Technique(lambda m, spec, mesh: fuse_attention(m, keep=spec.keep)),
    specs.SdpaAttention: Technique(lambda m, spec, mesh: fuse_attention(m, kernel="sdpa")),
    specs.SparseLikelihood: Technique(lambda m, spec, mesh: sparse_likelihood(m)),
    specs.HiddenParallel: Technique(share_hidden, on_decoder=True, needs_mesh=True),
    specs.FeatureParallel: Technique(share_features, on_decoder=True, needs_mesh=True),
    specs.RowParallelLinear: Technique(share_rows, needs_mesh=True),
    specs.DomainParallel: Technique(share_anchors, on_decoder=True, needs_mesh=True),
    specs.VertexParallel: Technique(share_vertices, needs_mesh=True),
    specs.RecomputeStrata: Technique(recompute_strata, on_decoder=True),
    specs.RecomputeBlock: Technique(recompute_block),
    specs.ChunkBlock: Technique(chunk_block),
    specs.StreamStrata: Technique(stream_strata, on_decoder=True),
    specs.CompileStrata: Technique(compile_strata, on_decoder=True),
    specs.StrataParallel: Technique(share_strata, on_decoder=True, needs_mesh=True),
    specs.PipelineStages: Technique(pipeline_stages, needs_mesh=True),
    ChunkLogits: Technique(lambda m, spec, mesh: Change({}, methods=chunk_logits(m))),
    ReplayOperators: Technique(lambda m, spec, mesh: Change({}, methods=replay_operators(m, spec))),
}
"""The package's own; those of `register_technique` stand in their strategy's row of planning."""


def _technique(spec: type) -> Technique | None:
    outside = (row.install for row in STRATEGIES.values() if spec in row.specs and row.install)
    return TECHNIQUES.get(spec) or next((Technique(install) for install in outside), None)


def change_of(
    module: nn.Module, spec: Any, mesh: DeviceMesh | None, *, strategy: str, fqn: str = ""
) -> Change:
    """What one technique makes of one module, once what all techniques need is there; nothing is changed yet.

    Args:
        module: The module that the rule names.
        spec: Of a type that has a technique.
        strategy: Whose rule it is, for the messages.
        fqn: The module's name, for the messages.

    Raises:
        InstallError: No mesh for what splits, no decoder where one is needed, or a module that the technique refuses.
    """
    technique = _technique(type(spec))
    assert technique is not None, f"{type(spec).__name__} has no technique, which install has checked"
    if technique.needs_mesh and mesh is None:
        raise InstallError(
            f"{strategy} was asked for on one device, found no mesh; it splits {STRATEGIES[strategy].shrinks} over the"
            f" ranks of a model axis: set model_parallel_size to 2 or more, or leave {strategy} out"
        )
    if technique.on_decoder and not is_decomposed(module):
        raise InstallError(
            f"{strategy} was asked for on {type(module).__name__!r}, which is no decomposed decoder (`strata`,"
            f" `chained`, `n_anchors`, `dim`); name the decoder in the rule, or leave {strategy} out"
        )
    made = technique.install(module, spec, mesh)
    if isinstance(made, nn.Module):
        return Change({"": made})
    if not isinstance(made, Change):
        raise InstallError(
            f"the technique of {strategy} returned {made!r} for {fqn!r}; allowed are a module and a Change"
        )
    return made


@dataclass(frozen=True, kw_only=True, slots=True)
class Swap:
    """One replacement: `parent.name` is `old` before and `new` after."""

    parent: nn.Module
    name: str
    fqn: str
    old: nn.Module | None
    new: nn.Module

    def put(self) -> None:
        """Carry it out."""
        self.parent._modules[self.name] = self.new

    def take(self) -> None:
        """Undo it."""
        self.parent._modules[self.name] = self.old


@dataclass(frozen=True, kw_only=True, slots=True)
class Overridden:
    """A module that stays, with one more override of its forward."""

    module: nn.Module
    fqn: str
    override: Override

    def put(self) -> None:
        """Carry it out; an InstallError where the module has another one in its place."""
        add_override(self.fqn, self.module, self.override)

    def take(self) -> None:
        """Undo it."""
        remove_override(self.module, self.override)


@dataclass(kw_only=True, slots=True)
class Methods:
    """A module that stays, with other functions in the places of some of its methods, by name."""

    module: nn.Module
    fqn: str
    functions: Mapping[str, Callable[..., Any]]
    take: Callable[[], None] = lambda: None
    """Undo it."""

    def put(self) -> None:
        """Carry it out."""
        methods = {name: MethodType(function, self.module) for name, function in self.functions.items()}
        self.take = put_methods(self.module, methods)


class Installed:
    """What was installed.

    Attributes:
        changes: In order.
        partial: Parameters of which every rank of the model axis has a part of the gradient: they need one sum; each of
            them is there once.
        sharded: Parameters that were replaced by this rank's shard.
    """

    def __init__(self, chunks: Any = None) -> None:
        self.changes: list[Swap | Overridden | Methods] = []
        self._chunks = {} if chunks is None else chunks
        self.partial: list[nn.Parameter] = []
        self.sharded: list[ShardedParameter] = []

    @property
    def swaps(self) -> list[Swap]:
        """The replacements."""
        return [change for change in self.changes if isinstance(change, Swap)]

    @property
    def overridden(self) -> list[Overridden]:
        """The modules that stay and run something else than their class's `forward`."""
        return [change for change in self.changes if isinstance(change, Overridden)]

    def undo(self) -> None:
        """Put the modules back that were there before; may be called twice."""
        while self.changes:
            self.changes.pop().take()

    def take_out(self, names: Sequence[str]) -> "Installed":
        """Undo what lies in some modules; returns it, for `put_back`."""
        taken = Installed()
        taken.changes = [change for change in self.changes if lies_in(change.fqn, names)]
        self.changes = [change for change in self.changes if not lies_in(change.fqn, names)]
        for change in reversed(taken.changes):
            change.take()
        return taken

    def put_back(self, taken: "Installed") -> None:
        """Put in again what was taken out."""
        for change in taken.changes:
            change.put()
        self.add(taken)

    def add(self, other: "Installed") -> None:
        """Count what another one has installed in the same module as of this one; its parameters are known here."""
        self.changes += other.changes

    @contextmanager
    def aside(self) -> Iterator[None]:
        """The modules that were there before, for as long as the block lasts."""
        for change in reversed(self.changes):
            change.take()
        try:
            yield
        finally:
            for change in self.changes:
                change.put()

    def apply(self, fqn: str, change: Change, module: nn.Module, *, strategy: str) -> None:
        """Carry out one technique's change of the module `fqn`."""
        for relative, new in change.swaps.items():
            path = ".".join(part for part in (fqn, relative) if part)
            parent_name, _, name = path.rpartition(".")
            parent = part(module, parent_name)
            check_parameters(path, parent._modules.get(name), new, change.sharded)
            check_hooks(path, parent._modules[name])
            check_forwards(path, parent._modules[name], new, strategy)
            self._carry_out(Swap(parent=parent, name=name, fqn=path, old=parent._modules[name], new=new))
        for relative, run in change.forwards.items():
            path = ".".join(part for part in (fqn, relative) if part)
            if isinstance(run, InChunks):
                run.known = self._chunks
            if isinstance(run, InChunks | RecomputedForward):
                run.fqn = path
            override = Override(strategy, run, getattr(run, "position", Position.INSTEAD))
            self._carry_out(Overridden(module=part(module, path), fqn=path, override=override))
        if change.methods:
            self._carry_out(Methods(module=part(module, fqn), fqn=fqn, functions=change.methods))
        # strata may share a parameter
        self.partial = list({id(p): p for p in (*self.partial, *change.partial)}.values())
        self.sharded += change.sharded

    def _carry_out(self, change: Swap | Overridden | Methods) -> None:
        change.put()
        self.changes.append(change)


def install(
    module: nn.Module, plan: Plan, mesh: DeviceMesh | None = None, *, within: Sequence[str] | None = None
) -> Installed:
    """Carry out a plan's rules on a module.

    Args:
        module: The LightningModule.
        plan: The plan.
        mesh: Device mesh with the axes "data" and "model"; None on one device.
        within: Names of modules, to carry out the rules for them and what lies in them only; None means all rules.

    Raises:
        PlanError: A rule needs a technique that this version cannot install.
        InstallError: A rule matches nothing, two rules of one strategy claim one module, or a technique refuses a
            module. The module is unchanged.
    """
    rules = [
        rule
        for rule in plan.rules
        if not isinstance(rule.spec, BY_STRATEGY) and (within is None or lies_in(rule.fqn, within))
    ]
    for rule in rules:
        if _technique(type(rule.spec)) is None:
            raise PlanError(_not_built(rule, plan))
    return install_rules(module, rules, mesh)


def install_rules(
    module: nn.Module, rules: Iterable[Rule], mesh: DeviceMesh | None = None, chunks: Any = None
) -> Installed:
    """Carry out rules that have techniques, as `install` does; the module is unchanged where one is refused.

    Plans of chunks are kept in the dictionary `chunks`, for who installs other rules in the module afterwards.
    """
    targets = [(rule, fqn) for rule in rules for fqn in _matches(rule, module)]
    targets.sort(key=lambda target: isinstance(target[0].spec, AROUND))
    claimed: set[tuple[str, type]] = set()
    decoders = list(find_decoders(module))
    for rule, fqn in targets:
        if (fqn, type(rule.spec)) in claimed:
            raise InstallError(
                f"{fqn!r} is claimed by two rules, the second is {rule.strategy} ({rule.fqn!r}); leave one out"
            )
        claimed.add((fqn, type(rule.spec)))
        overlaps = any(overlap(fqn, decoder) for decoder in decoders)
        if overlaps and isinstance(rule.spec, OF_BLOCKS):
            raise InstallError(
                f"{rule.strategy} was asked for on the block {fqn!r}, which is a part of the decoder"
                f" {', '.join(map(repr, decoders))} or holds it: its strata have techniques of their own; name blocks"
                " outside of it"
            )
    installed = Installed(chunks)
    try:
        for rule, fqn in targets:
            change = change_of(part(module, fqn), rule.spec, mesh, strategy=rule.strategy, fqn=fqn)
            installed.apply(fqn, change, module, strategy=rule.strategy)
        _refuse_shared(module, installed)
    except BaseException:
        installed.undo()
        raise
    return installed


def lies_in(fqn: str, names: Iterable[str]) -> bool:
    """Whether a name or pattern is for one of some modules, or for what lies in them."""
    return any(f"{fqn}.".startswith(f"{name}.") for name in names)


def overlap(fqn: str, other: str) -> bool:
    """Whether one of two modules lies in the other, or is it."""
    return lies_in(fqn, [other]) or lies_in(other, [fqn])


def _refuse_shared(module: nn.Module, installed: Installed) -> None:
    """A parameter that is split, and has another use too, would become two that are trained apart."""
    if not installed.sharded:
        return
    shards = {id(parameter.shard) for parameter in installed.sharded}
    names = {id(p): fqn for fqn, p in module.named_parameters() if id(p) not in shards}
    uses = {key: f"the module uses it as {fqn!r} too" for key, fqn in names.items()}
    # either of the two, for the decoder's rule may come first or last
    uses |= dict.fromkeys(map(id, installed.partial), "its layer lies in a decoder that is split already")
    for parameter in installed.sharded:
        use = uses.get(id(parameter.whole)) or uses.get(id(parameter.shard))
        if use:
            raise InstallError(
                f"{parameter.name!r} of a layer was to be split over ranks, but {use}, which would be trained apart;"
                " take the layer's rule out of the plan"
            )
        uses[id(parameter.whole)] = "another layer that is to be split has it too"


def _matches(rule: Rule, module: nn.Module) -> list[str]:
    if not rule.fqn:
        return [""]
    matches = [fqn for fqn, _ in named_parts(module) if fqn and fnmatchcase(fqn, rule.fqn)]
    if not matches:
        raise InstallError(
            f"{rule.strategy} is to change {rule.fqn!r}, which matches no module of"
            f" {type(module).__name__}; its children are {[name for name, _ in module.named_children()]!r}"
        )
    if isinstance(rule.spec, OF_BLOCKS):
        # a pattern such as "blocks.*" matches the parts of blocks too; an outer module comes first
        outer: set[str] = set()
        for fqn in matches:
            if outer.isdisjoint(accumulate(fqn.split("."), "{}.{}".format)):
                outer.add(fqn)
        matches = [fqn for fqn in matches if fqn in outer]
    return matches


def _not_built(rule: Rule, plan: Plan) -> str:
    kind = type(rule.spec)
    if rule.strategy not in STRATEGIES:
        return (
            f"{rule.strategy} ({kind.__name__}) is prescribed for {rule.fqn!r} ({rule.why}), and this process has not"
            " registered it; call register_technique in a module that every rank imports"
        )
    possible = [
        s for s in plan.strategies if any(r.strategy == s and _technique(type(r.spec)) for r in plan.rules)
    ]
    return (
        f"{rule.strategy} ({STRATEGIES[rule.strategy].title}) is prescribed for {rule.fqn!r} ({rule.why}), but this"
        f" version has no installer for it; train with strategies={','.join(['S1', *possible])!r} or give the devices"
        " more memory"
    )
