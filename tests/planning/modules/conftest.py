"""The made up steps of these tests have bytes by the hundred, beside which states of random numbers would be all."""

import pytest


@pytest.fixture(autouse=True)
def without_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DRAWS", "PRINT"):
        monkeypatch.setattr(f"lightning_amp.techniques.pipeline.schedule.stage_bytes.{name}", 0)
