"""Ask the rows of the table what techniques read from a counted step, and which of them its module cannot have.

A row is asked when a draft needs its answer: of a step that fits as it is, most are not.
"""

from collections.abc import Collection
from functools import cache, partial
from typing import Any

from lightning.pytorch import LightningModule

from lightning_amp.footprint.chain.chain_of import CountedStep
from lightning_amp.on_demand import OnDemand
from lightning_amp.techniques.contract.protocol import StepToPlan
from lightning_amp.techniques.table import STRATEGIES
from lightning_amp.techniques.technique import function_at, result_or_reason


def facts_of_step(module: LightningModule, step: CountedStep) -> OnDemand[Any]:
    """Return the facts that techniques read from a module and one count of its step, by technique."""

    def read(name: str) -> Any:
        row = STRATEGIES[name]
        return function_at(row.read_step)(module, step) if row.read_step else None

    return OnDemand(STRATEGIES, read)


def refused_techniques(module: LightningModule, step: CountedStep, *, values: bool) -> OnDemand[str]:
    """Return techniques that do not support the module or its step, with reasons."""

    def refuse(name: str) -> str | None:
        row = STRATEGIES[name]
        return (function_at(row.refusal)(module, step, values=values) or None) if row.refusal else None

    return OnDemand(STRATEGIES, refuse)


def looked_at(step: StepToPlan, names: Collection[str]) -> tuple[OnDemand[Any], OnDemand[str]]:
    """Return what techniques measure on a step with counts of their own, and why others could not."""
    looking = [name for name in names if STRATEGIES[name].look]

    @cache
    def look(name: str) -> Any:
        return result_or_reason(function_at(STRATEGIES[name].look), step)

    def split(name: str, *, failed: bool) -> Any:
        found = look(name)
        return found if isinstance(found, str) == failed else None

    return OnDemand(looking, partial(split, failed=False)), OnDemand(looking, partial(split, failed=True))
