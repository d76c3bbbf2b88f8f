"""What is simulated: a decoder by itself, or with the encoder of a graph that its anchors' latents come from."""

import torch
from torch import Tensor

from lightning_amp.costs.model_shape import DecoderShape, NetworkShape
from lightning_amp.models.graph_encoder import GraphEncoder
from lightning_amp.simulation.models_without_values import DecoderAlone, Subject, decoder_subject


class DecoderWithGraph(DecoderAlone):
    """A decoder, and an encoder of a graph of its anchors only: each joined to itself and to the next."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__(shape)
        every = torch.arange(shape.anchors, device="cpu")
        source = torch.cat((every, every[:-1]))
        ones = torch.ones(len(source), device="cpu")
        self.graph_encoder = GraphEncoder(
            shape.anchors,
            shape.dim,
            source=source,
            target=torch.cat((every, every[1:])),
            weight=ones,
            sign=ones,
            modalities={shape.fqn: every},
        ).to("meta")

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Of decoder and graph, with the reference model's number of sampled edges."""
        encoder, network = self.graph_encoder, NetworkShape()
        v = encoder.sample(*encoder())
        edges = encoder.nll(v.sample, n_positive=network.edges_per_step, negatives=network.negatives_per_edge)
        return self.decoded(batch, encoder.rows[self.fqn](v.sample)) + edges + encoder.kl(v.loc, v.std)


def subject_of(shape: DecoderShape, *, batch_size: int, graph: bool) -> Subject:
    """A decoder; its anchors' latents come from a graph, or are given."""
    if not graph:
        return decoder_subject(shape, batch_size=batch_size)
    made = decoder_subject(shape, batch_size=batch_size, kind=DecoderWithGraph)
    del made.batch["v"]
    return made
