"""Prints constraints.txt with the lowest versions that pyproject.toml allows for what the package itself needs."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
needed = "\n".join([*project["dependencies"], *project["optional-dependencies"]["test"]])
lowest = dict(re.findall(r"^([\w-]+)(?:\[\w+\])?>=([\d.]+)", needed, re.MULTILINE))
pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
assert lowest.keys() <= pins.keys(), f"constraints.txt lacks {sorted(lowest.keys() - pins.keys())!r}"
print(*(f"{name}=={version}" for name, version in {**pins, **lowest}.items()), sep="\n")
