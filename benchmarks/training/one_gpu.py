"""Language models on one GPU, planned with and without its host's memory: what fits, by what, and in which time.

    python -m benchmarks.training.one_gpu [--only NAME ...] [--devices NAME ...] [--host 500GiB] [--quick]

Llama's architecture (transformers) with AdamW, bf16-mixed, one sequence of 2,048 tokens, on fake tensors. For each
device by its data sheet: the plan that may use no host memory, and the plan that may use as much as given. Beside them
what one of eight such GPUs takes under FSDP with activation checkpointing, predicted by the same counts. The reference
model of Hi-C and RNA has the bins of the human genome at 100 kb with 32 strata, or those of chromosome 1 at 10 kb with
200, and 64 cells of each. All numbers are predictions; none of these steps has run. About forty minutes, most of them
where much is tried before a plan fits.
"""

import argparse
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import LightningModule

import lightning_amp
from benchmarks.page import origin, paragraph
from lightning_amp.profiling.profile import DecompositionProfile, GraphProfile, ModalityProfile, Profile
from lightning_amp.quantities import format_bytes, format_seconds
from lightning_amp.techniques.host_memory.limit import host_bytes_of

SIZES = {
    "1.3 B": {"hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": 24, "num_attention_heads": 16},
    "7 B": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
    "13 B": {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40},
}
HIC = {"Hi-C, 100 kb": (28_760, 32), "Hi-C, 10 kb": (24_896, 200)}
"""Anchors and strata."""
CELLS, GENES = 64, 5000
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
DEVICES = ("RTX 4090", "A100-80GB", "H100")
TOKENS, NO_HOST, GPUS = 2048, "1KiB", 8
HEADER = (
    *("model", "GPU", "as it is", "without the host", "with the host", "on the host"),
    f"FSDP and checkpointing on {GPUS}",
)


class LanguageModel(LightningModule):
    """A language model whose parameters have no values."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        with torch.device("meta"):
            self.model = LlamaForCausalLM(LlamaConfig(vocab_size=32_000, use_cache=False, **sizes))

    def training_step(self, batch: Any, batch_index: int) -> Any:
        """Return the loss of the next tokens."""
        return self.model(input_ids=batch["ids"], labels=batch["ids"]).loss

    def configure_optimizers(self) -> Any:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), 1e-4)


def planned(sizes: dict[str, int], device: str, *, tokens: int, **request: Any) -> Any:
    """Return the plan of a model."""
    batch = {"ids": torch.zeros(1, tokens, dtype=torch.int64)}
    return lightning_amp.plan(LanguageModel(**sizes), batch, rates=device, precision="bf16-mixed", **request).plan


def fits(plan: Any) -> str:
    """What a plan takes, the seconds of its batch and its techniques, or that it does not fit."""
    by = ", ".join(name for name in plan.strategies if name != "S1") or "nothing"
    seconds = (plan.predicted_step_seconds or 0.0) + (plan.predicted_rest_seconds or 0.0)
    return (
        f"{format_bytes(plan.predicted_peak_bytes)}, {format_seconds(seconds)}, {by}" if plan.fits else "does not fit"
    )


def row(name: str, sizes: dict[str, int], device: str, *, host: str, tokens: int) -> list[str]:
    """Cells of one model and device."""
    without = planned(sizes, device, tokens=tokens, host_memory=NO_HOST)
    whole = without.diagnosis.peak_bytes
    beside = planned(sizes, device, tokens=tokens, host_memory=host) if without.strategies else without
    split = planned(sizes, device, tokens=tokens, devices=GPUS, strategies="fsdp,recompute")
    return [
        *(name, device, format_bytes(whole), fits(without), fits(beside)),
        *(format_bytes(host_bytes_of(beside.rules)), fits(split)),
    ]


def profile_of(anchors: int, strata: int) -> Profile:
    """Return the profile of a data set of these sizes; the counts decide nothing of a plan's bytes."""
    features = tuple(anchors - k for k in range(strata))
    hic = ModalityProfile(
        name="hic",
        file="hic.h5ad",
        probability_model="HiCZINB",
        cells=4000,
        features=sum(features),
        nonzero=4000 * 100_000,
        scale=34.0,
        contact_spread=None,
        decomposition=DecompositionProfile(
            anchors=anchors, features=features, distances=tuple(range(strata)), attention=True
        ),
    )
    rna = replace(hic, name="rna", file="rna.h5ad", probability_model="NB", features=GENES, decomposition=None)
    graph = GraphProfile(file="graph", vertices=anchors + GENES, edges=8 * anchors)
    return Profile(data_dir="data", modalities=(hic, rna), graph=graph)


def hic_row(name: str, device: str) -> list[str]:
    """Cells of the reference model, which is planned with all of the host's memory."""
    data = profile_of(*HIC[name])
    # with room for everything, so that nothing is searched for
    plain = lightning_amp.plan(data, batch_size=CELLS, rates=device, strategies="S1", device_memory="100TiB")
    made = lightning_amp.plan(data, batch_size=CELLS, rates=device)
    host = host_bytes_of(made.rules)
    return [
        *(name, device, format_bytes(plain.predicted_peak_bytes), "" if host else fits(made), fits(made)),
        *(format_bytes(host), ""),
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*SIZES, *HIC], default=[*SIZES, *HIC])
    parser.add_argument("--devices", nargs="+", default=list(DEVICES))
    parser.add_argument("--host", default="500GiB", help="host memory of the rank")
    parser.add_argument("--quick", action="store_true", help="one small model and device")
    asked = parser.parse_args()
    print("\n".join(paragraph(origin("python -m benchmarks.training.one_gpu"))))
    print(f"\n| {' | '.join(HEADER)} |\n|{'---|' * len(HEADER)}")
    models = {"small": SMALL} if asked.quick else {name: SIZES.get(name) for name in asked.only}
    devices, tokens = (asked.devices[:1], 64) if asked.quick else (asked.devices, TOKENS)
    for name, sizes in models.items():
        for device in devices:
            made = hic_row(name, device) if sizes is None else row(name, sizes, device, host=asked.host, tokens=tokens)
            print("| " + " | ".join(made) + " |", flush=True)


if __name__ == "__main__":
    main()
