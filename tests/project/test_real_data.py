"""Claim: real single-cell Hi-C and RNA go from files to an embedding that tells the cell types apart."""

import sys
from pathlib import Path

import cooler
import pytest

from tests.paths import EXAMPLES

sys.path.insert(0, str(EXAMPLES))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_ranks_learn_the_cell_types_of_the_cortex(real_data: Path, tmp_path: Path) -> None:
    from cortex import score, train

    embedding = train(real_data, tmp_path, devices=2, epochs=12, batch_size=32)
    (hic,) = (tmp_path / "data" / "hic").glob("*.h5ad")
    scores = score(embedding, hic)
    print(scores)
    # 0.88; with the 30 epochs of the example 0.845, 0.905, 0.890 and 0.850 for seeds 0 to 3: rounding on another
    # processor moves it as much as a seed does
    assert scores["embedding"] >= 0.75, scores
    assert scores["depth alone"] < 0.5, scores
    cells = cooler.fileops.list_scool_cells(str(tmp_path / "predictions" / "imputed.scool"))
    assert len(cells) == 4
    for name in ("memory/memory.csv", "memory/memory.png", "predictions/embedding.png", "checkpoints/last.ckpt"):
        assert (tmp_path / name).stat().st_size > 0
