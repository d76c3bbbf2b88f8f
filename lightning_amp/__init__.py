"""Train a PyTorch Lightning module within a memory budget: `Trainer(strategy="amp")`.

Importing this package registers the strategies "amp", "amp_spawn", "amp_fork" and "amp_notebook" with Lightning.
The order of the two imports does not matter. Every public name is loaded on first use, so that the command line can
profile without loading torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import wrapt

from lightning_amp.errors import AmpError as AmpError
from lightning_amp.errors import DataError as DataError
from lightning_amp.errors import InstallError as InstallError
from lightning_amp.errors import ModelError as ModelError
from lightning_amp.errors import PlanError as PlanError
from lightning_amp.errors import ShardError as ShardError

if TYPE_CHECKING:
    from lightning_amp.data.loading.datamodule import SingleCellDataModule as SingleCellDataModule
    from lightning_amp.data.loading.dataset import OwnBins as OwnBins
    from lightning_amp.data.loading.dataset import OwnColumns as OwnColumns
    from lightning_amp.data.prepare.prepare import prepare as prepare
    from lightning_amp.diagnosis import diagnose as diagnose
    from lightning_amp.diagnosis import register_signal as register_signal
    from lightning_amp.footprint.module_profile import ModuleProfile as ModuleProfile
    from lightning_amp.graph.build_table import register_flow as register_flow
    from lightning_amp.lightning.callbacks.memory_monitor import StratumMemoryMonitor as StratumMemoryMonitor
    from lightning_amp.lightning.callbacks.prediction_writer import PredictionWriter as PredictionWriter
    from lightning_amp.lightning.callbacks.predictions import collect_predictions as collect_predictions
    from lightning_amp.lightning.profiling.module_plan import ModulePlan as ModulePlan
    from lightning_amp.lightning.strategy.strategy import AMPStrategy as AMPStrategy
    from lightning_amp.models.glue import GLUE as GLUE
    from lightning_amp.planning.plan.plan import Plan as Plan
    from lightning_amp.profiling.profile import Profile as Profile
    from lightning_amp.public import plan as plan
    from lightning_amp.public import profile as profile
    from lightning_amp.sharding.ops import ShardedTensor as ShardedTensor
    from lightning_amp.sharding.own_parts import as_sharded as as_sharded
    from lightning_amp.sharding.own_parts import own_part as own_part
    from lightning_amp.sharding.register_shard import check_shard as check_shard
    from lightning_amp.sharding.register_shard import register_shard as register_shard
    from lightning_amp.techniques.chunk.run.chunk_module import chunk as chunk
    from lightning_amp.techniques.chunk.run.module_chunks import ModuleChunks as ModuleChunks
    from lightning_amp.techniques.contract.change import Change as Change
    from lightning_amp.techniques.pipeline.schedule.cut import PipelineCut as PipelineCut
    from lightning_amp.techniques.pipeline.schedule.cut import cut_pipeline as cut_pipeline
    from lightning_amp.techniques.register_technique import register_technique as register_technique
    from lightning_amp.verification.verify import verify as verify

_HOME = {
    "SingleCellDataModule": "data.loading.datamodule",
    "prepare": "data.prepare.prepare",
    "diagnose": "diagnosis",
    "register_signal": "diagnosis",
    "StratumMemoryMonitor": "lightning.callbacks.memory_monitor",
    "PredictionWriter": "lightning.callbacks.prediction_writer",
    "collect_predictions": "lightning.callbacks.predictions",
    "AMPStrategy": "lightning.strategy.strategy",
    "GLUE": "models.glue",
    "Change": "techniques.contract.change",
    "ShardedTensor": "sharding.ops",
    "OwnBins": "data.loading.dataset",
    "OwnColumns": "data.loading.dataset",
    "own_part": "sharding.own_parts",
    "as_sharded": "sharding.own_parts",
    "check_shard": "sharding.register_shard",
    "register_shard": "sharding.register_shard",
    "chunk": "techniques.chunk.run.chunk_module",
    "ModuleChunks": "techniques.chunk.run.module_chunks",
    "PipelineCut": "techniques.pipeline.schedule.cut",
    "cut_pipeline": "techniques.pipeline.schedule.cut",
    # these modules also register how plans and profiles are printed
    "Plan": "planning.reports.plan_report",
    "plan": "public",
    "register_flow": "graph.build_table",
    "register_technique": "techniques.register_technique",
    "Profile": "planning.reports.plan_report",
    "ModuleProfile": "planning.reports.module_report",
    "ModulePlan": "lightning.profiling.plan_of_module",
    "profile": "public",
    "verify": "verification.verify",
}

__version__ = "0.1.0"

__all__ = ["AmpError", "DataError", "InstallError", "ModelError", "PlanError", "ShardError", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; its public names are {sorted(__all__)}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)


@wrapt.when_imported("lightning.pytorch.strategies")
def _register(strategies: Any) -> None:
    from lightning_amp.lightning.strategy.registration import register

    register(strategies.StrategyRegistry)


@wrapt.when_imported("pytorch_lightning.strategies")
def _refuse(strategies: Any) -> None:
    from lightning_amp.lightning.strategy.registration import refuse

    refuse(strategies.StrategyRegistry)
