"""Count the blocks of a training step as pipeline stages, for micro-batches of several sizes."""

from lightning.pytorch import LightningModule

from lightning_amp.errors import AmpError
from lightning_amp.footprint.chain.chain_of import CountedStep
from lightning_amp.footprint.chain.passes import Passes
from lightning_amp.techniques.contract.protocol import StepToPlan
from lightning_amp.techniques.pipeline.run.blocks import BY_HAND, optimises_by_hand, refuse_lists
from lightning_amp.techniques.pipeline.stage_facts import StageFacts


def look(step: StepToPlan) -> StageFacts:
    """Return functions that count the passes of the step."""
    return StageFacts(passes=None if step.no_stages else _Counts(step).passes, reason=step.no_stages)


def refusal(module: LightningModule, step: CountedStep, *, values: bool) -> str:
    """Why the blocks of the step cannot be stages; "" if they can."""
    by_hand = BY_HAND if optimises_by_hand(module) else ""
    return by_hand or refuse_lists(module) or step.no_stages


class _Counts:
    """Cache of counted micro-batches."""

    def __init__(self, step: StepToPlan) -> None:
        self._step = step
        self._passes: dict[int, Passes | str] = {}

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
