"""List the benchmarks, or run one.

    python -m benchmarks [--list]
    python -m benchmarks NAME [ARGUMENTS]      the same as python -m benchmarks.NAME [ARGUMENTS]
    python -m benchmarks NAME --quick          a run of about a minute on an idle core, whose figures are no results

A benchmark is a module with a `main` that is called when it runs, such as `tensor3d.exactness`. The list has its name
and the first sentence of its docstring; `python -m benchmarks NAME --help` has the rest.
"""

import ast
import difflib
import runpy
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from textwrap import fill

QUICK = {
    "any_module.attributes": ["--only", "points"],
    "any_module.files_entered": [],
    "any_module.streams": ["--only", "samples"],
    "chunks.autochunk": ["--only", "Figure 4, memory of nodes"],
    "domain": ["--ranks", "1", "4"],
    "domain.exactness": ["--ranks", "2", "--only", "GPT"],
    "domain.held_out": ["--only", "synthetic", "--seeds", "0", "--epochs", "1"],
    "domain.insulation": ["--only", "synthetic", "--seeds", "0", "--epochs", "1"],
    "domain.integration": ["--only", "synthetic", "--seeds", "0", "--epochs", "2"],
    "domain.operators": ["--ranks", "2"],
    "domain.paper": ["--only", "Table I, linear layers"],
    "domain.scaling": ["--ranks", "1", "4", "--sides", "1024", "--volume"],
    "domain.times": ["--rounds", "1", "--only", "ViT"],
    "domain.training": ["transolver", "--ranks", "1"],
    "gpu": ["--tiny", "--device", "cpu", "--only", "exactness", "--out", "{folder}"],
    "kernels.compiled": ["--rounds", "1"],
    "kernels.kernel_count": ["--cells", "8", "--anchors", "600", "--window", "160"],
    "kernels.measured_operators": ["--only", "torch: nn.TransformerEncoder"],
    "kernels.measured_steps": [],
    "memory.of_a_step": ["--out", "{folder}/memory.png"],
    "memory.per_stratum": ["--out", "{folder}"],
    "offload": ["--only", "points"],
    "offload.curves": ["--only", "points", "--out", "{folder}/curves.png"],
    "paper": [],
    "pipeline.schedule_picture": ["--out", "{folder}/schedule.png"],
    "replay": ["--only", "points", "--shares", "--steps", "3"],
    "replay.logits": ["--words", "5000", "--tokens", "128"],
    "replay.published": ["--only", "ResNet-101", "--images", "2", "--budgets", "400MiB", "--steps", "3"],
    "tensor3d.attacks": ["--grids", "2,1,1", "--only", "norm"],
    "tensor3d.bytes": [],
    "tensor3d.curves": ["--steps", "4", "--ranks", "8", "--only", "GPT"],
    "tensor3d.exactness": ["--ranks", "2", "--only", "GPT"],
    "tensor3d.paper": ["--only", "Table I, parameters"],
    "tensor3d.peers": ["odd"],
    "training.compiled_blocks": ["--only", "torch: nn.TransformerEncoder"],
    "training.loading": ["--gigabytes", "0.05"],
}
"""Arguments of a short run, of commands that have no flag --quick; those without arguments are short. {folder} is a
folder of its own, which is deleted.
"""
FOLDER = Path(__file__).resolve().parent
WIDTH = 88


def found() -> Iterator[tuple[str, str]]:
    """Yield the name and the first sentence of every benchmark, in the order of names."""
    for path in sorted(FOLDER.rglob("*.py")):
        module = ast.parse(path.read_text())
        runs = any(isinstance(part, ast.If) and "__main__" in ast.unparse(part.test) for part in module.body)
        if runs and path.parent != FOLDER:
            parts = path.relative_to(FOLDER).with_suffix("").parts
            name = ".".join(part for part in parts if part != "__main__")
            yield name, " ".join((ast.get_docstring(module) or "").split("\n\n")[0].split())


def main() -> None:
    """List, or run; a name that is not known ends with status 2 and the nearest names."""
    known, given = dict(found()), sys.argv[1:]
    if given in ([], ["--list"]):
        for name, about in known.items():
            print(fill(f"{name:<26} {about}", WIDTH, subsequent_indent=" " * 27))
        return
    if given[0] in ("-h", "--help"):
        print((__doc__ or "").strip())
        return
    name, sys.argv = given[0], sys.argv[1:]
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "--list shows them"
        print(f"no benchmark is called {name!r}: {hint}", file=sys.stderr)
        sys.exit(2)
    with tempfile.TemporaryDirectory() as folder:
        if name in QUICK and "--quick" in sys.argv:
            words = [word.replace("{folder}", folder) for word in QUICK[name]]
            sys.argv[1:] = [*words, *(word for word in sys.argv[1:] if word != "--quick")]
        runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
