"""Bytes and time of steps whose parameters are updated within the backward pass, beside a plain step.

    python -m benchmarks.training.early_update [--only NAME ...] [--steps 6] [--quick]

For each module and optimizer: the most bytes of the first two steps, plain and with `early_update`, predicted by the
plan and counted by the meter; the largest difference of parameters, buffers and losses; seconds of a later step, by
plain's. Batches are small, so that parameters are most of a step. On a CPU, whose optimizers have no launches to save.
Modules of transformers, timm and torchvision are left out where these are not installed. About three minutes.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec

import torch
from torch import nn

from benchmarks.page import origin, paragraph
from benchmarks.zoo import one_run, subject
from benchmarks.zoo.one_run import difference, fit, same_draws
from benchmarks.zoo.subject import Case, Made
from lightning_amp import AMPStrategy
from lightning_amp.quantities import format_bytes

subject.OPTIMIZERS["AdamW"] = lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)
OPTIMIZERS = ("SGD", "AdamW", "AdamW foreach", "Adafactor")


def mlp() -> Made:
    """Eight layers of 1,024."""
    layers = [layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.GELU())]
    return nn.Sequential(*layers), (torch.randn(8, 1024),), torch.randn(8, 1024)


def gpt2() -> Made:
    """GPT-2, six layers of 512, 4,000 words."""
    from transformers import GPT2Config, GPT2LMHeadModel

    network = GPT2LMHeadModel(GPT2Config(n_layer=6, n_embd=512, n_head=8, vocab_size=4000, n_positions=64))
    ids = torch.randint(0, 4000, (1, 64))
    return network, {"input_ids": ids, "labels": ids}, None


def vit() -> Made:
    """ViT-S of timm at 64 pixels, with stochastic depth."""
    import timm

    network = timm.create_model("vit_small_patch16_224", depth=6, img_size=64, num_classes=10, drop_path_rate=0.1)
    return network, (torch.randn(2, 3, 64, 64),), torch.tensor([1, 2])


def resnet() -> Made:
    """ResNet-18 of torchvision."""
    from torchvision.models import resnet18

    return resnet18(num_classes=10), (torch.randn(2, 3, 64, 64),), torch.tensor([1, 2])


MAKE: dict[str, tuple[str, Callable[[], Made]]] = {
    "MLP": ("torch", mlp),
    "GPT-2": ("transformers", gpt2),
    "ViT-S": ("timm", vit),
    "ResNet-18": ("torchvision", resnet),
}
HEADER = ("module", "optimizer", "plain", "predicted", "measured", "of plain", "difference", "step / plain")


def row(name: str, case: Case, optimizer: str) -> list[str]:
    """Cells of one module and optimizer."""
    plain = fit(case, torch.float32, optimizer, AMPStrategy())
    found = fit(case, torch.float32, optimizer, AMPStrategy(strategies="early_update"))
    assert found.plan is not None, "AMPStrategy has one"
    assert same_draws(found, plain)
    return [
        name,
        optimizer,
        format_bytes(plain.peak),
        f"{found.plan.predicted_peak_bytes:,}",
        f"{found.peak:,}",
        f"{found.peak / plain.peak:.0%}",
        f"{difference(found, plain):g}",
        f"{found.step / plain.step:.2f}",
    ]


def cases(only: Sequence[str], optimizers: Sequence[str], *, quick: bool) -> Iterator[tuple[str, Case, str]]:
    """Name, case and optimizer of each fit, of modules whose packages are installed; `quick`: one of each."""
    for name in only[:1] if quick else only:
        package, make = MAKE[name]
        if find_spec(package) is None:
            continue
        for optimizer in ("AdamW",) if quick else optimizers:
            yield name, Case(package, make), optimizer


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(MAKE), default=list(MAKE))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--quick", action="store_true", help="one module and optimizer")
    asked = parser.parse_args()
    one_run.STEPS = asked.steps
    torch.set_num_threads(1)
    print("\n".join(paragraph(origin("python -m benchmarks.training.early_update"))))
    print(f"\n| {' | '.join(HEADER)} |\n|{'---|' * len(HEADER)}")
    for case in cases(asked.only, OPTIMIZERS, quick=asked.quick):
        print("| " + " | ".join(row(*case)) + " |", flush=True)


if __name__ == "__main__":
    main()
