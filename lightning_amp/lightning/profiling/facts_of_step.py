"""Ask the rows of the table what techniques read from a counted step, and which of them its module cannot have."""

from typing import Any

from lightning.pytorch import LightningModule

from lightning_amp.footprint.chain.chain_of import CountedStep
from lightning_amp.techniques.table import STRATEGIES
from lightning_amp.techniques.technique import function_at


def facts_of_step(module: LightningModule, step: CountedStep) -> dict[str, Any]:
    """Return the facts that techniques read from a module and one count of its step."""
    rows = {name: row.read_step for name, row in STRATEGIES.items() if row.read_step}
    return {name: function_at(read)(module, step) for name, read in rows.items()}


def refused_techniques(module: LightningModule, step: CountedStep, *, values: bool) -> dict[str, str]:
    """Return techniques that do not support the module or its step, with reasons."""
    found = {
        name: function_at(row.refusal)(module, step, values=values) for name, row in STRATEGIES.items() if row.refusal
    }
    return {name: why for name, why in found.items() if why}
