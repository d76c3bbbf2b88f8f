"""Describe the commands: purpose, behaviour and an example of each."""

from textwrap import fill
from typing import Any

PROGRAM = "lightning-amp"
WIDTH = 78

VERBS: dict[str, tuple[str, str, str]] = {
    "demo": (
        "make a small data set, plan, train on two CPU ranks, predict",
        "Run the whole flow on synthetic cells, by the commands that a person would type, in a minute or two.",
        "--out demo",
    ),
    "prepare": (
        "write a data directory from .scool, .h5ad and genes",
        "Turn single-cell contacts, raw RNA counts and gene positions into a data directory, and say what is kept"
        " and what is left out, and why. Cells of the two need not be the same; contacts are read one cell at a time.",
        "--hic cells.scool --rna rna.h5ad --genes genes.gtf.gz \\\n      --strata 32 --out data",
    ),
    "profile": (
        "say what a data directory or a model's training step holds",
        "Of a directory: how many cells and features each modality has, how sparse it is, and into which strata the"
        " Hi-C decoder falls; reads headers, no counts. Of a configuration: which modules and tensors have the memory"
        " at the peak of its model's training step, run without values.",
        "data",
    ),
    "plan": (
        "say where memory will end, and what to do about it",
        "Choose strategies and a mesh of ranks for a data directory, and predict memory and time of a training step"
        " under them. Nothing is trained. With --config FILE.yaml, or MODULE:CLASS and --batch,"
        " any module is planned by a profile of its step. Status 3 where nothing fits a memory that was named.",
        "data --devices 4 --device-memory 24GiB --batch-size 64",
    ),
    "simulate": (
        "count a training step's bytes on any number of ranks, without a GPU",
        "Run a training step of the planned model without values, and count what every rank would hold and send.",
        "data --devices 8 --batch-size 64 --plot memory.png",
    ),
    "calibrate": (
        "measure a step on this device, so that predicted times fit it",
        "Measure a decoder step several times on an idle machine, fit the rates of the time model to the best one,"
        " measure the link to host memory, and write them as JSON, for --rates of plan and simulate and for"
        " AMPStrategy(rates=...). With --config FILE.yaml, or MODULE:CLASS and --batch, each operator of a training"
        " step is measured too, at five sizes of the batch, and steps with these operators are predicted by them.",
        "--device cpu --out rates.json",
    ),
    "tune": (
        "train some steps under the plans that are predicted to be fastest",
        "Plan the model of a configuration, train a few steps on this machine under each of the plans that fit and are"
        " predicted to be fastest, and write the one that is. With --strategies tensor3d these are its grids.",
        "--config config.yaml --devices 8 --out plan.json",
    ),
    "convert": (
        "write a sharded checkpoint as the plain one, a single file",
        "Put the shards of a checkpoint directory together: any Trainer loads the file, under any strategy.",
        "checkpoints/last.ckpt --out whole.ckpt",
    ),
    "verify": (
        "compare several ranks with one process on your own model",
        "Train the model of a configuration for a few steps on one process and on several CPU ranks, under the plan,"
        " and compare losses, gradients and weights; name suspects where they differ. Status 1 if they do.",
        "--config configs/demo.yaml --strategies S1,S3,S4",
    ),
    "fit": (
        "Lightning's fit, with strategy amp",
        "Train with Lightning's Trainer, strategy amp unless another is named; checkpoints and logs go where the"
        " configuration says. All flags are Lightning's.",
        "--config configs/demo.yaml",
    ),
    "validate": (
        "Lightning's validate, with strategy amp",
        "Run the validation loop of a model once, by its weights in a checkpoint. All flags are Lightning's.",
        "--config config.yaml --ckpt_path last",
    ),
    "test": (
        "Lightning's test, with strategy amp",
        "Run the test loop of a model once, by its weights in a checkpoint. All flags are Lightning's.",
        "--config config.yaml --ckpt_path last",
    ),
    "predict": (
        "Lightning's predict, with strategy amp",
        "Predict with the weights of a checkpoint; the callback PredictionWriter writes embeddings, contact maps and"
        " pictures. --data DIR predicts the cells of another data directory, and --out DIR names the folder to write"
        " to. All other flags are Lightning's.",
        "--config config.yaml --ckpt_path last --data new --out predictions_new",
    ),
    "report": (
        "check a trained model: pictures and a table of its losses, embedding and maps",
        "Read a run's newest checkpoint and its data, and write to a folder: losses, the embedding by type, batch and"
        " modality, contact maps of one cell of each type beside the mean of its type, contacts by distance, and a"
        " table that compares each with a baseline, such as a PCA of the counts.",
        "lightning_logs/version_0",
    ),
}


def described(verb: str) -> dict[str, Any]:
    """Return description and example of a command as arguments of ArgumentParser."""
    _, description, example = VERBS[verb]
    return {"description": fill(description, WIDTH), "epilog": f"example:\n  {PROGRAM} {verb} {example}"}
