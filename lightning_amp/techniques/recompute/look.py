"""Read from a counted step whether its blocks can run a second time."""

from lightning.pytorch import LightningModule

from lightning_amp.footprint.chain.chain_of import CountedStep


def refusal(module: LightningModule, step: CountedStep, *, values: bool) -> str:
    """Why no block of the step can run again; "" where blocks can."""
    return step.no_second_pass
