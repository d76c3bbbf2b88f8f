"""All cases of the zoo by name, "library: model", in an order in which libraries alternate."""

from benchmarks.zoo import huggingface, images, others, volumes
from benchmarks.zoo.subject import Case

GROUPS = (huggingface.CASES, *images.CASES, *volumes.CASES, *others.CASES)


def alternating(groups: tuple[dict[str, Case], ...]) -> dict[str, Case]:
    """A part of the cases is like all of them: those of a group are evenly spread."""
    places = [((k + 0.5) / len(group), name, case) for group in groups for k, (name, case) in enumerate(group.items())]
    return {name: case for _, name, case in sorted(places, key=lambda one: one[:2])}


CASES = alternating(GROUPS)
QUICK = ("torch: nn.TransformerEncoder", "local_attention: LocalTransformer")
PREDICTED = ()
