"""Predict the seconds of a model's step: in its decoder (step_seconds.py), and outside of it.

Outside are encoders, graph, other decoders, optimiser and Lightning's own loop:

    activations   `PASSES` times the bytes that are alive outside of the strata
    update        weights, gradients and optimiser state, read and written
    the rest      `KERNELS` operators with the Python between them, whatever the sizes
    data axis     the gradients of all parameters outside of the decoder, averaged

Known of the reference model only: what other models have outside of their decoder is not counted. Measured on one
core of a shared machine with five sizes of data, the whole step took 0.8 to 1.9 times what is predicted so.

Known limits: S2 and nodes, which split some of it, count like any other plan; loading of data is not counted.
Legend: B cells of a rank.
"""

from dataclasses import replace

from lightning_amp.costs.device_rates import Rates
from lightning_amp.costs.link_seconds import collective_seconds
from lightning_amp.costs.model_shape import ModelShape
from lightning_amp.planning.plan.axes import Axes, MeshShape
from lightning_amp.planning.time.collectives import gradient_numbers
from lightning_amp.planning.time.step_seconds import step_seconds

PASSES = 8
KERNELS = 3000


def on_device(shape: ModelShape, rates: Rates) -> ModelShape:
    """The model on the device whose rates are taken, whose settings its bytes and its kernels follow from.

    Every plan is made of such a shape, so that memory and time are those of one device.
    """
    if shape.decoder is None:
        return shape
    threads = 1 if rates.launches else shape.decoder.threads
    return replace(shape, decoder=replace(shape.decoder, launched=rates.launches, threads=threads))


def decoder_seconds(shape: ModelShape, axes: Axes, mesh: MeshShape, rates: Rates) -> float | None:
    """Predicted time of the decoder's part of a step, None for a model without a decoder; as `step_seconds`."""
    if shape.decoder is None:
        return None
    assert shape.decoder.launched == rates.launches, "the shape is that on the device of the rates: on_device"
    return step_seconds(
        shape.decoder,
        axes,
        mesh,
        cells=shape.batch_size,
        rates=rates,
        element_bytes=shape.element_bytes,
    )


def rest_seconds(shape: ModelShape, mesh: MeshShape, rates: Rates) -> float | None:
    """Predicted time of a step outside of the decoder; None where that is not the reference model's."""
    if shape.decoder is None or not (shape.wide_layers and shape.base_activation_bytes):
        return None
    alive = shape.base_activation_bytes + shape.other_decoder_bytes + shape.edge_bytes
    update = (6 + 4 * shape.optimizer_slots) * shape.parameter_bytes
    # forward, and backward to the weights only: nothing asks for the input's gradient
    flops = 4 * shape.batch_size * shape.wide_weight_bytes / shape.element_bytes
    outside = shape.parameter_bytes - shape.element_bytes * sum(gradient_numbers(shape.decoder, Axes()))
    return (
        (PASSES * alive + update) / rates.memory_bytes
        + flops / rates.matmul_flops
        + KERNELS * rates.overhead_seconds
        + collective_seconds("all_reduce", max(0, outside), mesh.data, rates.links, inner=mesh.model)
    )
