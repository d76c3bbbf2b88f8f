"""Makes the description that a package index shows: the README with absolute links; all else is in pyproject.toml."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
URL = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]


def _absolute(link: re.Match[str]) -> str:
    folder = "raw" if link[0].startswith("!") else "blob"
    return f"{link[0]}{URL}/{folder}/main/"


setup(
    long_description=re.sub(
        r"!?\[[^\]]*\]\((?!https://|#)", _absolute, (ROOT / "README.md").read_text(encoding="utf-8")
    ),
    long_description_content_type="text/markdown",
)
