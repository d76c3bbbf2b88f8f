"""Define `ModuleProfile`: what a training step of a module needs, printable and stored as JSON.

Legend: sizes end in `_bytes`; a module is named as `named_modules` names it, the LightningModule itself is "".
"""

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

SCHEMA = 1
PARAMETERS, GRADIENTS, STATE = "parameters", "gradients", "optimiser state"
ACTIVATIONS, TEMPORARIES = "activations", "temporaries"
HELD = (PARAMETERS, GRADIENTS, STATE)
"""What a step keeps for the next one."""
KINDS = (PARAMETERS, GRADIENTS, STATE, ACTIVATIONS, TEMPORARIES)
FORWARD, BACKWARD, OPTIMISER = "forward", "backward", "optimiser"
PHASES = {FORWARD: "forward pass", BACKWARD: "backward pass", OPTIMISER: "optimiser's step"}
Part = Literal["parameters", "tensor", "saved", "head"]
PARTS: tuple[Part, ...] = ("parameters", "tensor", "saved", "head")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleBytes:
    """What one module holds at the peak, its children not counted, by kind."""

    fqn: str
    n_bytes: int
    by_kind: dict[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorBytes:
    """One tensor that is alive at the peak.

    Attributes:
        name: Of a parameter; "NAME.grad" of its gradient; "NAME.KEY" of what the optimiser keeps for it; "batch"; else
            the operator that made the tensor, with "backward of" before it where the backward pass did.
        fqn: Module that holds it or made it.
    """

    name: str
    fqn: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    n_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """A stretch of the step in which one module worked: the bytes alive by kind when there were most.

    Attributes:
        n_operators: Length of the stretch.
    """

    phase: str
    fqn: str
    by_kind: dict[str, int]
    n_operators: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleProfile:
    """The second training step of one LightningModule on one device.

    Attributes:
        peak_bytes: Most bytes alive at once: parameters and buffers, gradients, optimiser state, the batch, activations
            and temporaries.
        largest: The largest of `parts`.
        parts: The peak in parts by what would make them smaller. `parameters`: with gradients, optimiser state
            and what the optimiser's step makes.
            `head`: logits, and what the loss makes of their shape. `tensor`: the largest other tensor, with those of
            its shape that the same module has alive. `saved`: all other activations and temporaries.
        by_kind: The peak by kind.
        peak_phase: "forward", "backward" or "optimiser".
        peak_module: Module that was at work at the peak.
        modules: Modules by what they hold at the peak, largest first.
        tensors: Tensors alive at the peak, largest first.
        timeline: The step from its first operator to its last.
        measured: "fake tensors", or "a real step" where the step needs values.
        reason: Why the step could not run on fake tensors, "" where it could.
        batch_size: Length of the batch's first dimension, None where its tensors have none in common.
        added_bytes: Gradients that are there when the backward pass begins, to which it adds its own.
        first_bytes: Most bytes alive at once in the first step.
        left_bytes: Made by that step and kept, without gradients and optimiser state, such as what is logged;
            it is none of the second step's bytes.
        counted: What `lightning_amp.plan` plans by, None of a profile that it cannot plan by; not stored.
    """

    peak_bytes: int
    largest: Part
    parts: dict[str, int]
    by_kind: dict[str, int]
    peak_phase: str
    peak_module: str
    modules: tuple[ModuleBytes, ...]
    tensors: tuple[TensorBytes, ...]
    timeline: tuple[Moment, ...]
    measured: str
    reason: str = ""
    batch_size: int | None = None
    added_bytes: int = 0
    first_bytes: int = 0
    left_bytes: int = 0
    schema: int = SCHEMA
    counted: Any = field(default=None, repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        plain = asdict(replace(self, counted=None))
        del plain["counted"]
        return plain

    def plot(
        self,
        path: str | Path,
        *,
        predicted: "ModuleProfile | None" = None,
        budget_bytes: int | None = None,
        title: str = "memory of a training step",
    ) -> Path:
        """Draw the step as an area by kind over its operators, with the modules that hold most at the peak.

        Args:
            path: PNG to write; returned.
            predicted: The same step as it was predicted, drawn as a line, next to the modules of this one.
            budget_bytes: Memory that may be used.
            title: What was run.
        """
        # matplotlib is slow to load, and only needed where a picture is drawn
        from lightning_amp.figures import StepCurve, step_memory

        def curve(profile: ModuleProfile) -> StepCurve:
            return StepCurve(
                phases=[moment.phase for moment in profile.timeline],
                lengths=[moment.n_operators for moment in profile.timeline],
                by_kind={kind: [m.by_kind[kind] for m in profile.timeline] for kind in KINDS},
                holders={row.fqn: row.by_kind for row in profile.modules},
            )

        at = f"{PHASES[self.peak_phase]} of {self.peak_module or 'the module itself'}"
        step_memory(
            Path(path),
            curve(self),
            predicted=None if predicted is None else curve(predicted),
            at=at,
            budget_bytes=budget_bytes,
            title=title,
        )
        return Path(path)
