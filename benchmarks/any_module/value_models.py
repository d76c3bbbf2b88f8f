"""Define the models of `benchmarks.any_module.values`: values decide the shapes or branches of their training step."""

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 64
F64 = torch.float64
Loss = Callable[["Net", Any], Tensor]


class Net(LightningModule):
    """A network with a loss, as a function of both and a batch."""

    def __init__(self, network: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.network, self._loss = network, loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss."""
        return self._loss(self, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


Made = tuple[LightningModule, Any]


def _mean_square(module: Net, batch: Any) -> Tensor:
    found: Tensor = module.network(*batch).square().mean()
    return found


class Block(nn.Module):
    """A residual block with a hidden layer."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Add what the block computes."""
        found: Tensor = x + self.narrow(F.gelu(self.wide(self.norm(x))))
        return found


class Experts(nn.Module):
    """Each row goes to one expert, as a mixture of experts in eager code has it."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.route, self.experts = nn.Linear(WIDTH, experts), nn.ModuleList(Block() for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        """Route the rows."""
        weight, choice = self.route(x).softmax(-1).max(-1)
        found = torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            (rows,) = torch.where(choice == k)
            if rows.numel():
                found = found.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return found


def own_experts() -> Made:
    """Four layers of four experts."""
    return Net(nn.Sequential(*(Experts() for _ in range(4))), _mean_square), (torch.randn(2048, WIDTH, dtype=F64),)


def logged_loss() -> Made:
    """Blocks whose step logs `loss.item()` and stops where the loss is not finite."""

    def loss(module: Net, batch: Any) -> Any:
        found = _mean_square(module, batch)
        module.log("loss", found.item())
        return found if torch.isfinite(found) else None

    return Net(nn.Sequential(*(Block() for _ in range(4))), loss), (torch.randn(512, WIDTH, dtype=F64),)


class PackedGru(nn.Module):
    """A GRU over sequences of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(WIDTH, WIDTH, 2, batch_first=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Pack, run and pad."""
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        found: Tensor = self.head(nn.utils.rnn.pad_packed_sequence(self.gru(packed)[0], batch_first=True)[0])
        return found


def packed_gru() -> Made:
    """32 sequences of 3 to 20 steps."""
    return Net(PackedGru(), _mean_square), (torch.randn(32, 20, WIDTH, dtype=F64), torch.randint(3, 21, (32,)))


def gpt2_masked() -> Made:
    """GPT-2 whose loss takes the logits that have a label."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=200, n_embd=WIDTH, n_layer=4, n_head=4, n_positions=64, use_cache=False)

    def loss(module: Net, batch: Any) -> Tensor:
        words, labels = batch
        logits = module.network(input_ids=words).logits
        return F.cross_entropy(logits[labels != -100], labels[labels != -100])

    words = torch.randint(0, 200, (16, 64))
    return Net(GPT2LMHeadModel(config), loss), (words, words.where(torch.rand(16, 64) < 0.3, -100))


def qwen3_moe() -> Made:
    """Qwen3-MoE with its experts in eager code."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **{"vocab_size": 200, "hidden_size": WIDTH, "intermediate_size": 128, "moe_intermediate_size": 64},
        **{"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
        **{"num_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 128, "use_cache": False},
        experts_implementation="eager",
    )
    network = Qwen3MoeForCausalLM(config)
    return Net(network, lambda m, b: m.network(input_ids=b[0], labels=b[0]).loss), (torch.randint(0, 200, (8, 64)),)


def switch_transformers() -> Made:
    """Switch Transformers: an encoder and a decoder whose experts have a capacity."""
    from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

    config = SwitchTransformersConfig(
        **{"vocab_size": 200, "d_model": WIDTH, "d_kv": 16, "d_ff": 128, "num_heads": 4, "num_experts": 4},
        **{"num_layers": 4, "num_decoder_layers": 4, "expert_capacity": 64, "decoder_start_token_id": 0},
        use_cache=False,
    )
    network = SwitchTransformersForConditionalGeneration(config)
    for module in network.modules():
        if hasattr(module, "expert_capacity"):
            # routers convert themselves to float32, which a run in float64 is not compared in
            module.dtype = torch.float64
    return Net(network, lambda m, b: m.network(input_ids=b[0], labels=b[0]).loss), (torch.randint(0, 200, (8, 64)),)


def wav2vec2_ctc() -> Made:
    """wav2vec2 with connectionist temporal classification; some labels are padding."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    config = Wav2Vec2Config(
        **{"vocab_size": 30, "hidden_size": WIDTH, "num_hidden_layers": 4, "num_attention_heads": 4},
        **{"intermediate_size": 128, "conv_dim": (32,) * 3, "conv_stride": (5, 2, 2), "conv_kernel": (10, 3, 3)},
        **{"num_feat_extract_layers": 3, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4},
        **{"layerdrop": 0.0, "mask_time_prob": 0.0},
    )
    labels = torch.randint(1, 30, (4, 12))
    labels[1, 8:] = -100
    network, sound = Wav2Vec2ForCTC(config), torch.randn(4, 3200, dtype=F64)
    return Net(network, lambda m, b: m.network(input_values=b[0], labels=b[1]).loss), (sound, labels)


def informer() -> Made:
    """Informer, whose attention takes the queries with the largest scores."""
    from transformers import InformerConfig, InformerForPrediction

    config = InformerConfig(
        **{"prediction_length": 8, "context_length": 16, "lags_sequence": [1, 2], "num_time_features": 2},
        **{"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64},
        **{"input_size": 1, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0},
    )
    n, past = 32, 18
    batch = {
        "past_values": torch.randn(n, past, dtype=F64),
        "past_time_features": torch.randn(n, past, 2, dtype=F64),
        "past_observed_mask": torch.ones(n, past, dtype=F64),
        "future_values": torch.randn(n, 8, dtype=F64),
        "future_time_features": torch.randn(n, 8, 2, dtype=F64),
    }
    return Net(InformerForPrediction(config), lambda m, b: m.network(**b).loss), batch


class Layers(nn.Module):
    """Layers of a graph network, one after the other."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, *graph: Tensor) -> Tensor:
        """Run them with the same graph."""
        for layer in self.layers:
            x = layer(x, *graph).relu()
        return x


def gat() -> Made:
    """Four layers of graph attention on 300 nodes and 1,200 edges."""
    from torch_geometric.nn import GATConv

    network = Layers([GATConv(WIDTH, 16, heads=4) for _ in range(4)])
    return Net(network, _mean_square), (torch.randn(300, WIDTH, dtype=F64), torch.randint(0, 300, (2, 1200)))


def near(places: Tensor, radius: float) -> Tensor:
    """Return the pairs of points within a radius, as values decide."""
    return (torch.cdist(places, places) < radius).nonzero().t()


class Points(nn.Module):
    """Layers of PointTransformer on points that are near to each other."""

    def __init__(self) -> None:
        super().__init__()
        from torch_geometric.nn import PointTransformerConv

        self.layers = Layers([PointTransformerConv(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        """Find the pairs, and run the layers."""
        found: Tensor = self.layers(x, places, near(places, 0.5))
        return found


def point_transformer() -> Made:
    """150 points in space."""
    return Net(Points(), _mean_square), (torch.randn(150, WIDTH, dtype=F64), torch.randn(150, 3, dtype=F64))


def interactions(places: Tensor, molecule: Tensor) -> tuple[Tensor, Tensor]:
    """Return the pairs of atoms of a molecule within a radius, and their distances."""
    distances = torch.cdist(places, places)
    found = (distances < 4) & (molecule[:, None] == molecule) & ~torch.eye(len(places), dtype=torch.bool)
    pairs = found.nonzero().t()
    return pairs, distances[pairs[0], pairs[1]]


def schnet() -> Made:
    """SchNet on eight molecules of 15 atoms."""
    from torch_geometric.nn.models import SchNet

    sizes = {"hidden_channels": 32, "num_filters": 32, "num_interactions": 3, "num_gaussians": 20}
    network = SchNet(**sizes, cutoff=4.0, interaction_graph=interactions)

    def loss(module: Net, batch: Any) -> Tensor:
        atoms, places, molecule, energy = batch
        found: Tensor = (module.network(atoms, places, molecule) - energy).square().mean()
        return found

    places, energy = 2 * torch.randn(120, 3, dtype=F64), torch.randn(8, 1, dtype=F64)
    return Net(network, loss), (torch.randint(1, 10, (120,)), places, torch.arange(120) // 15, energy)


MODELS: dict[str, tuple[Callable[[], Made], str]] = {
    "Qwen3-MoE": (qwen3_moe, "transformers"),
    "Switch Transformers": (switch_transformers, "transformers"),
    "wav2vec2 CTC": (wav2vec2_ctc, "transformers"),
    "Informer": (informer, "transformers"),
    "GPT-2, masked logits": (gpt2_masked, "transformers"),
    "GAT": (gat, "torch_geometric"),
    "SchNet": (schnet, "torch_geometric"),
    "PointTransformer": (point_transformer, "torch_geometric"),
    "packed GRU": (packed_gru, ""),
    "own experts": (own_experts, ""),
    "loss.item(), isfinite": (logged_loss, ""),
}
"""How each one is made, and the package that it needs."""
