"""The notebook runs from top to bottom in under 3 minutes, and shows what it says: types that mix, pictures."""

import json
import re
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from tests.paths import EXAMPLES

NOTEBOOK = EXAMPLES / "quickstart.ipynb"


@pytest.mark.exhaustive
@pytest.mark.release
@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")
def test_the_quick_start_runs_and_shows_what_it_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[Path] = []
    # the cells are plain Python; IPython only shows the pictures
    display: Any = ModuleType("IPython.display")
    display.Image = lambda path, **_: shown.append(Path(path)) or SimpleNamespace()
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    names: dict[str, Any] = {"__name__": "__main__"}
    start = time.perf_counter()
    for number, cell in enumerate(cells):
        exec(compile("".join(cell["source"]), f"{NOTEBOOK.name}, code cell {number}", "exec"), names)
    assert time.perf_counter() - start < 180
    assert [path.name for path in shown] == ["memory.png", "embedding.png", "contact_map.png"]
    assert all(imread(path).std() > 0.02 for path in shown), "a picture is blank"
    for modality in ("rna", "hic"):
        assert np.isfinite(names[modality].obsm["X_amp"]).all()
    share = re.search(r"same-type share ([\d.]+)", capsys.readouterr().out)
    assert share is not None
    assert float(share[1]) > 0.9
    names["folder"].cleanup()
