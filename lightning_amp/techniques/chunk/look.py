"""Look for chunks in the blocks of a training step, and show the code that they run."""

from collections.abc import Sequence
from functools import partial

from lightning.pytorch import LightningModule

from lightning_amp.costs.rule import Rule
from lightning_amp.footprint.chain.chain_of import CountedStep
from lightning_amp.techniques.chunk.forms import ChunkForms
from lightning_amp.techniques.chunk.run.block_tables import block_code, block_tables
from lightning_amp.techniques.chunk.spec import ChunkBlock
from lightning_amp.techniques.contract.step_to_plan import StepToPlan


def look(step: StepToPlan, rows: int | None = None) -> ChunkForms:
    """The forms of the step's blocks, for a batch of so many rows; captured when they are read first."""
    counted = step.step(rows)
    shared = step.shared_statistics and rows is None
    return ChunkForms(counted.chain, partial(block_tables, step.module, counted.calls, shared=shared))


def refusal(module: LightningModule, step: CountedStep, *, values: bool) -> str:
    """Why no block of the step can run in chunks; "" where blocks can."""
    return step.no_second_pass


def code(step: StepToPlan, rules: Sequence[Rule]) -> str:
    """What the blocks run that rules name, as Python."""
    budgets = {rule.fqn: rule.spec.budget_bytes for rule in rules if isinstance(rule.spec, ChunkBlock)}
    found = block_code(step.module, step.step().calls, budgets)
    return "\n\n\n".join(f"# {names}\n{code}" for names, code in found.items())
