"""Detect the blocks of a module that can be pipeline stages, and define the install function that runs them so."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_amp.errors import InstallError
from lightning_amp.footprint.find_blocks import MARK, find_blocks, longest_list
from lightning_amp.techniques.contract.change import Change, hooks_within
from lightning_amp.techniques.data.batch_norm import has_batch_norms
from lightning_amp.techniques.pipeline.row import PipelineStages
from lightning_amp.techniques.pipeline.run.block_walk import BlockWalk, StageBlock


def pipeline_stages(blocks: nn.Module, spec: PipelineStages, mesh: DeviceMesh) -> Change:
    """Override the forward of a list's blocks, so that they run as stages.

    Raises:
        InstallError: `blocks` is no ModuleList or Sequential, has a module twice or hooks, the ends are invalid, or the
            device is not the CPU.
    """
    name = type(blocks).__name__
    if not isinstance(blocks, nn.ModuleList | nn.Sequential):
        raise InstallError(
            f"pipeline does not support {name!r}; allowed is a ModuleList or a Sequential whose modules a"
            " step walks in order: name it in the rule"
        )
    children = dict(blocks.named_children())
    ends = [int(end) for end in spec.ends.split(",")]
    if len(children) < len(blocks):
        raise InstallError(
            f"pipeline does not support {name!r}, which has a module in it twice; a block belongs to one"
            " stage: leave 'pipeline' out"
        )
    ranks = mesh["model"].size()
    stages = ranks * spec.stages_per_rank
    if len(ends) != stages or ends != sorted(set(ends)) or ends[0] < 1 or ends[-1] != len(children):
        raise InstallError(
            f"pipeline got ends={spec.ends!r}; allowed are {stages!r} rising numbers, the last one"
            f" {len(children)!r}, for {len(children)!r} blocks on {ranks!r} ranks of the model axis with"
            f" {spec.stages_per_rank!r} stages each"
        )
    if found := hooks_within(blocks):
        raise InstallError(
            f"pipeline does not support {name!r}, which has {', '.join(found)}; they would be called on one"
            " rank, and on others with tensors without values: take them off, or leave 'pipeline' out"
        )
    if mesh.device_type != "cpu":
        raise InstallError(
            f"pipeline does not support {mesh.device_type!r}; it supports the CPU only, because what"
            " neighbouring stages send each other in both directions at once has not been tried with NCCL:"
            " leave 'pipeline' out"
        )
    walk = BlockWalk(name, len(children))
    return Change({}, forwards={key: StageBlock(walk, i) for i, key in enumerate(children)})


def refuse_hooks(parameter: nn.Parameter) -> None:
    """Raise an InstallError for gradient hooks, which would run for every micro-batch and again for the batch."""
    watched = len(getattr(parameter, "_post_accumulate_grad_hooks", None) or ())
    if parameter._backward_hooks or watched > 1:
        raise InstallError(
            f"pipeline is not supported: a parameter of shape {tuple(parameter.shape)!r} has hooks on its"
            " gradient, which would be called for every micro-batch and once more for the batch; do what"
            " they do in on_after_backward, or leave 'pipeline' out"
        )


BY_HAND = (
    "it has automatic_optimization=False, and stages return one loss of the batch with its gradients: return the loss,"
    " and take accumulate_grad_batches and gradient_clip_val of the Trainer, and a scheduler of configure_optimizers"
)
"""Why a module that optimises by hand has no stages, and what to do instead."""


def refuse_module(module: nn.Module) -> None:
    """Raise an InstallError for a module that would train differently in stages than in one process."""
    if optimises_by_hand(module):
        raise InstallError(
            f"pipeline is not supported: {type(module).__name__!r} optimises by hand: {BY_HAND}, or leave 'pipeline'"
            " out"
        )
    if has_batch_norms(module):
        raise InstallError(
            "pipeline is not supported: the module has BatchNorm layers, which in a pipeline would "
            "use the statistics of a micro-batch and train another model; use layers that "
            "normalise each sample separately (LayerNorm, GroupNorm), or leave 'pipeline' out"
        )
    for parameter in module.parameters():
        refuse_hooks(parameter)


def optimises_by_hand(module: nn.Module) -> bool:
    """Whether the module's step calls backward and optimizers itself."""
    return getattr(module, "automatic_optimization", True) is False


def refuse_lists(module: nn.Module) -> str:
    """Return why a list of lists cannot be stages; "" if the longest list of the module is none."""
    found = longest_list(module)
    if found is None:
        return ""
    for name, block in module.get_submodule(found[0]).named_children():
        if isinstance(block, nn.ModuleList | nn.ModuleDict):
            return (
                f"{found[0]!r} is a list of lists ({name!r} is a {type(block).__name__!r}), which no step calls: make a"
                " module of each, whose forward calls what is in it"
            )
    return ""


def blocks_for_stages(module: nn.Module) -> tuple[tuple[str, ...], str]:
    """Return the names of the blocks that can be stages, in order; or none, and why, without running the module."""
    found = longest_list(module)
    if found is None:
        return (), "it has no ModuleList or Sequential of two modules and more that could be stages"
    blocks = module.get_submodule(found[0])
    if len(dict(blocks.named_children())) < found[1]:
        return (), f"{found[0]!r} has a module in it twice"
    if lists := refuse_lists(module):
        return (), lists
    if hooks := hooks_within(blocks):
        return (), f"{found[0]!r} has {', '.join(hooks)}, which would be called on one rank"
    if optimises_by_hand(module):
        return (), BY_HAND
    if has_batch_norms(module):
        return (
            (),
            "it normalises by the statistics of a batch (BatchNorm), of which a stage would see a micro-batch's",
        )
    names = tuple(f"{found[0]}.{name}" for name, _ in blocks.named_children())
    known = find_blocks(module)
    if not known.keys() >= {*names} and any(MARK in vars(block) for block in known.values()):
        return (), f"blocks= names other modules than those of {found[0]!r}, the longest list"
    return names, ""
