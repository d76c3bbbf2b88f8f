"""A technique lies in one folder: the files elsewhere that name it are few, and may only become fewer."""

import ast
import re
from pathlib import Path

import lightning_amp

LIBRARY = Path(lightning_amp.__file__).parent
NAMED = {
    "fsdp": (r"techniques\.fsdp|FullyShard|[\"']fsdp[\"']", 5),
    "chunk": (r"techniques\.chunk|[\"']chunk[\"'](?!, [\"'](?:cat|tensor_split|unbind)[\"'])", 4),
    "pipeline": (r"techniques\.pipeline|[\"']pipeline[\"']", 6),
    # one is the key of a mark of torch's partitioner
    "recompute": (r"techniques\.recompute|[\"']recompute[\"']", 6),
    "logits": (r"techniques\.logits|[\"']logits[\"']", 4),
    # offload decides with it what is kept, runs again or leaves
    "replay": (r"techniques\.replay|[\"']replay[\"']", 5),
    "offload": (r"techniques\.offload|[\"']offload[\"']", 2),
    "compile": (r"techniques\.compile\b|[\"']compile[\"']", 7),
    "compiled_budget": (r"techniques\.compiled_budget|[\"']compiled_budget[\"']", 1),
    "early_update": (r"techniques\.early_update|[\"']early_update[\"']", 1),
    "host_optimizer": (r"techniques\.host_optimizer|[\"']host_optimizer[\"']", 1),
    "sequence": (r"techniques\.sequence|[\"']sequence[\"']", 4),
    "tensor3d": (r"techniques\.tensor3d|[\"']tensor3d[\"']", 6),
}
"""How code names a technique, and the files outside its folder that do; torch's operator "chunk" is not counted."""


def code_of(path: Path) -> str:
    """The code of a file, without docstrings and comments."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        for body in (getattr(node, "body", None), getattr(node, "orelse", None)):
            if isinstance(body, list):
                body[:] = [line for line in body if not _is_docstring(line)] or [ast.Pass()]
    return ast.unparse(tree)


def _is_docstring(line: ast.AST) -> bool:
    return isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant) and isinstance(line.value.value, str)


def test_few_files_outside_its_folder_name_a_technique() -> None:
    for name, (pattern, most) in NAMED.items():
        files = [
            str(path.relative_to(LIBRARY))
            for path in LIBRARY.rglob("*.py")
            if f"techniques/{name}/" not in path.as_posix()
            and re.search(pattern, path.read_text())
            and re.search(pattern, code_of(path))
        ]
        assert len(files) <= most, (name, files)
