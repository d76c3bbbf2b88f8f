"""Define a simulation request, and build its module and plan."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning_amp.costs.model_shape import LATENT_DIM, reference_shape
from lightning_amp.data.batch import tensors_in
from lightning_amp.installing.describe_module import describe
from lightning_amp.planning.plan.decoder_only import profile_of_module
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.planning.policies.make_plan import plan
from lightning_amp.profiling.profile import Profile
from lightning_amp.simulation.models_without_values import Subject, decoder_subject, reference_subject
from lightning_amp.simulation.parse_shape import ShapeRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationRequest:
    """A subject and its plan."""

    make: Callable[[], Subject]
    plan: Plan


def request_decoder(asked: ShapeRequest, *, batch_size: int, **request: Any) -> SimulationRequest:
    """A decoder by itself, and its plan; `batch_size` counts where the sizes do not say the cells.

    Args:
        **request: As for `make_plan.plan`.

    Raises:
        PlanError: No plan answers the request.
    """
    batch_size = batch_size if asked.batch_size is None else asked.batch_size
    make = partial(decoder_subject, asked.decoder, batch_size=batch_size)
    subject = make()
    shape = describe(
        subject.module, batch_size=batch_size, base_activation_bytes=sum(t.nbytes for t in tensors_in(subject.batch))
    )
    made = plan(profile_of_module(shape), batch_size=batch_size, shape=shape, **request)
    return SimulationRequest(make=make, plan=made)


def request_reference(
    profile: Profile, *, batch_size: int, latent_dim: int | None, window: int | None, **request: Any
) -> SimulationRequest:
    """The reference model for some data, and its plan; arguments and errors as for `make_plan.plan`."""
    dim = LATENT_DIM if latent_dim is None else latent_dim
    shape = reference_shape(profile, batch_size=batch_size, latent_dim=dim, window=window)
    made = plan(profile, batch_size=batch_size, shape=shape, **request)
    make = partial(reference_subject, profile, batch_size=batch_size, latent_dim=dim, window=window)
    return SimulationRequest(make=make, plan=made)
