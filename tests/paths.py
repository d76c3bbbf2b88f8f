"""Where the repository's folders are, for tests at any depth."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
REAL_DATA = ROOT.parent / "shared" / "data"
