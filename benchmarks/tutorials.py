"""Runs the tutorials as a reader would, prints what their blocks print, and keeps the pictures they draw.

    python -m benchmarks.tutorials [PAGE ...]

Tests run the same blocks with one epoch of training (tests/project/test_docs.py). Pictures that a page draws under the
name of a file beside it are copied to docs/tutorials. `many_gpus.png` is drawn here.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from matplotlib.figure import Figure

from lightning_amp.figures import INK
from tests.paths import ROOT
from tests.project.test_docs import RUN, blocks, commands, start

FOLDER = ROOT / "docs" / "tutorials"
QUESTION, ANSWER, MANY = "#e8eef7", "#e3f2e6", "#fdeeda"
BOXES = (
    (55, 57, "Does a step fit one device?", QUESTION),
    (17, 45, "Is it fast enough?", QUESTION),
    (70, 45, "What is the largest part of the peak?", QUESTION),
    (8, 31, "nothing to\ninstall", ANSWER),
    (27, 31, "S1: data parallel,\nmore devices", MANY),
    (47, 31, "recompute, chunk,\nreplay, logits", ANSWER),
    (70, 31, "fsdp", MANY),
    (93, 31, "stream\n(GLUE)", ANSWER),
    (47, 17, "sequence\n(and fsdp, recompute)", MANY),
    (70, 17, "pipeline", MANY),
    (93, 17, "strata, nodes", MANY),
    (70, 5.5, "tensor3d", MANY),
    (11, 11, "on one device", ANSWER),
    (11, 5.5, "on several devices", MANY),
)
"""Centre, text and colour: questions, techniques of one device, techniques of several."""
ARROWS = (
    ((43, 56), (20, 47.5), "yes"),
    ((57, 55), (68, 47.5), "no"),
    ((15, 43), (9, 34.5), "yes"),
    ((19, 43), (26, 34.5), "no"),
    ((65, 43), (48, 34.5), "activations"),
    ((70, 43), (70, 33), "parameters"),
    ((77, 43), (92, 34.5), "a Hi-C decoder"),
    ((47, 27.7), (47, 20.5), "one sample is too large"),
    ((70, 29), (70, 19), "gathers are slow"),
    ((93, 27.7), (93, 19), "still too large"),
    ((70, 15), (70, 7.5), "one layer is too large"),
)


def run(page: Path) -> None:
    """Run the blocks of a page in an empty folder, in one process, commands in their own."""
    names: dict[str, object] = {"__name__": "page"}
    for block in blocks(page):
        if not block.runs or block.language == "text":
            continue
        began = time.monotonic()
        print(f"\n=== {page.name}\n{block.text.splitlines()[0]} ...", flush=True)
        if block.title:
            Path(block.title).write_text(block.text)
        elif block.language == "python":
            exec(compile(block.text, page.name, "exec"), names)
        for words in commands(block):
            if block.status is None and words[1] not in RUN:
                continue
            start(words)
        print(f"=== {time.monotonic() - began:.1f} s", flush=True)


def decision_diagram(path: Path) -> None:
    """Draw which technique to use when, from one device to many."""
    figure = Figure(figsize=(11, 6.2), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 110), ylim=(0, 62))
    axes.axis("off")
    for x, y, text, colour in BOXES:
        style = {"boxstyle": "round,pad=0.55", "facecolor": colour, "edgecolor": INK}
        axes.text(x, y, text, ha="center", va="center", fontsize=10.5, color=INK, bbox=style, zorder=2)
    for tail, tip, text in ARROWS:
        arrow = {"arrowstyle": "-|>", "color": INK, "linewidth": 1.2}
        axes.annotate("", xy=tip, xytext=tail, arrowprops=arrow, zorder=1)
        x, y = (tail[0] + tip[0]) / 2, (tail[1] + tip[1]) / 2
        ground = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
        axes.text(x, y, text, ha="center", va="center", fontsize=9.5, color=INK, bbox=ground, zorder=3)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run the pages that were named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", default=sorted(path.stem for path in FOLDER.glob("*.md")))
    pages = parser.parse_args().pages
    decision_diagram(FOLDER / "many_gpus.png")
    for name in pages:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            sys.path.insert(0, folder)
            run(FOLDER / f"{name}.md")
            for picture in Path().rglob("*.png"):
                if f"({picture.name})" in (FOLDER / f"{name}.md").read_text():
                    shutil.copy(picture, FOLDER / picture.name)
                    print(f"wrote {FOLDER / picture.name}")
            os.chdir(ROOT)


if __name__ == "__main__":
    main()
