"""Collect the functions with which the planner searches for pipeline stages (`StageSearch`)."""

from functools import partial

from lightning_amp.techniques.pipeline.stage_facts import blocks_of, without_stages
from lightning_amp.techniques.pipeline.stage_forms import asked_inside, decided, with_named
from lightning_amp.techniques.pipeline.stages import best_pipeline, staged, uncut
from lightning_amp.techniques.stage_search import StageSearch
from lightning_amp.techniques.technique import result_or_reason

SEARCH = StageSearch(
    # also for named stages: a plan says then that their bytes are not known
    staged=partial(result_or_reason, staged),
    best=best_pipeline,
    blocks=blocks_of,
    fixed=decided,
    named=with_named,
    inside=asked_inside,
    uncut=uncut,
    without=without_stages,
    limit="a stage keeps the gradients of two steps, and what is in flight",
    names="lightning_amp.techniques.pipeline.run.blocks:blocks_for_stages",
    refuse="lightning_amp.techniques.pipeline.run.blocks:refuse_module",
    install="lightning_amp.techniques.pipeline.steps.pipelined_steps:install",
)
