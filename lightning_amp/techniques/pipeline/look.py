"""Count the blocks of a training step as pipeline stages, for micro-batches of several sizes, also in chunks."""

from collections.abc import Mapping

from lightning.pytorch import LightningModule

from lightning_amp.costs.rule import Rule
from lightning_amp.errors import AmpError
from lightning_amp.footprint.chain.chain_of import CountedStep
from lightning_amp.footprint.chain.passes import Passes
from lightning_amp.techniques.chunk.forms import ChunkForms
from lightning_amp.techniques.chunk.look import costs_of
from lightning_amp.techniques.chunk.look import look as look_for_chunks
from lightning_amp.techniques.chunk.row import ChunkBlock
from lightning_amp.techniques.contract.protocol import StepToPlan
from lightning_amp.techniques.pipeline.run.blocks import BY_HAND, optimises_by_hand, refuse_lists
from lightning_amp.techniques.pipeline.stage_facts import StageChunks, StageFacts


def look(step: StepToPlan) -> StageFacts:
    """Return functions that count the passes of the step, without and with blocks in chunks."""
    counts = _Counts(step)
    return StageFacts(
        passes=None if step.no_stages else counts.passes,
        reason=step.no_stages,
        chunks=StageChunks(forms=counts.forms, passes=counts.passes_in_chunks, costs=costs_of(step)),
    )


def refusal(module: LightningModule, step: CountedStep, *, values: bool) -> str:
    """Why the blocks of the step cannot be stages; "" if they can."""
    by_hand = BY_HAND if optimises_by_hand(module) else ""
    return by_hand or refuse_lists(module) or step.no_stages


class _Counts:
    """Cache of counted micro-batches."""

    def __init__(self, step: StepToPlan) -> None:
        self._step = step
        self._passes: dict[int, Passes | str] = {}
        self._forms: dict[int, ChunkForms] = {}
        self._chunked: dict[tuple[int, frozenset[tuple[str, ChunkBlock]]], Passes | str] = {}

    def passes(self, rows: int | None) -> Passes | str:
        """Return the passes of a batch of `rows` rows: counted for two sizes, interpolated for others."""
        whole = self._step.step().passes
        if rows is None or isinstance(whole, str) or rows == whole.rows:
            return whole
        counted = next(iter(self._passes.values()), None)
        between = whole.at(counted, rows) if isinstance(counted, Passes) else None
        if between is not None:
            return between
        if rows not in self._passes:
            try:
                self._passes[rows] = self._step.step(rows).passes
            except AmpError as error:
                # some rows of a graph, or of concatenated sequences, are not a valid batch
                self._passes[rows] = (
                    f"a micro-batch of {rows} of the batch's {whole.rows} rows cannot be counted: {error}"
                )
        return self._passes[rows]

    def forms(self, rows: int) -> ChunkForms:
        """Return how the blocks of a micro-batch can run in chunks."""
        if rows not in self._forms:
            self._forms[rows] = look_for_chunks(self._step, rows)
            self._passes.setdefault(rows, self._step.step(rows).passes)
        return self._forms[rows]

    def passes_in_chunks(self, rows: int, chunks: Mapping[str, ChunkBlock]) -> Passes | str:
        """Return the passes of a micro-batch with some blocks in chunks, or why one of them does not support it."""
        key = rows, frozenset(chunks.items())
        if key not in self._chunked:
            rules = [Rule(fqn=fqn, spec=spec, strategy="chunk", why="counted") for fqn, spec in chunks.items()]
            try:
                self._chunked[key] = self._step.step_with(rules, rows).passes
            except AmpError as error:
                self._chunked[key] = str(error)
        return self._chunked[key]
