"""A technique lies in one folder: the files elsewhere that name it are few, and may only become fewer."""

import re
from pathlib import Path

import lightning_amp

LIBRARY = Path(lightning_amp.__file__).parent
NAMED = {
    "fsdp": (r"techniques\.fsdp|FullyShard|[\"']fsdp[\"']", 6),
    "chunk": (r"techniques\.chunk|[\"']chunk[\"']", 16),
    "pipeline": (r"techniques\.pipeline|[\"']pipeline[\"']", 6),
    "recompute": (r"techniques\.recompute|[\"']recompute[\"']", 18),
    "logits": (r"techniques\.logits|[\"']logits[\"']", 5),
    "replay": (r"techniques\.replay|[\"']replay[\"']", 2),
    "sequence": (r"techniques\.sequence|[\"']sequence[\"']", 6),
    "tensor3d": (r"techniques\.tensor3d|[\"']tensor3d[\"']", 7),
}
"""How code names a technique, and the files outside its folder that do; docs and comments are not counted."""


def test_few_files_outside_its_folder_name_a_technique() -> None:
    for name, (pattern, most) in NAMED.items():
        files = [
            str(path.relative_to(LIBRARY))
            for path in LIBRARY.rglob("*.py")
            if f"techniques/{name}/" not in path.as_posix() and re.search(pattern, path.read_text())
        ]
        assert len(files) <= most, (name, files)
