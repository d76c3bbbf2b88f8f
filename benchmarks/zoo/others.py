"""Models of x_transformers, local_attention, torch_geometric, peft, scvi-tools, torch and Lightning's own examples."""

from typing import Any

import torch
from torch import nn

from benchmarks.zoo.subject import Case, Made

WORDS = 200


def of_words(layers: Any, **options: Any) -> Made:
    """A network of x_transformers that predicts the next word."""
    import x_transformers

    network = x_transformers.TransformerWrapper(num_tokens=WORDS, max_seq_len=64, attn_layers=layers, **options)
    return Transposed(network), (torch.randint(0, WORDS, (8, 64)),), torch.randint(0, WORDS, (8, 64))


class Transposed(nn.Module):
    """Moves the scores of words to the dim where cross-entropy has them."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        """Scores [text, word, place]."""
        found = self.network(*given)
        return found.transpose(1, 2)


def decoder(**options: Any) -> Made:
    """x_transformers' decoder with an option of it."""
    import x_transformers

    return of_words(x_transformers.Decoder(dim=64, depth=3, heads=4, **options))


def encoder_decoder() -> Made:
    """A text from another."""
    import x_transformers

    sizes = {"num_tokens": WORDS, "depth": 2, "heads": 4, "max_seq_len": 64}
    network = x_transformers.XTransformer(
        dim=64, **{f"{side}_{name}": size for side in ("enc", "dec") for name, size in sizes.items()}
    )
    return network, (torch.randint(0, WORDS, (8, 64)), torch.randint(0, WORDS, (8, 64))), None


def series() -> Made:
    """Real numbers in place of words."""
    import x_transformers

    network = x_transformers.ContinuousTransformerWrapper(
        dim_in=16, dim_out=16, max_seq_len=64, attn_layers=x_transformers.Encoder(dim=64, depth=3, heads=4)
    )
    return network, (torch.randn(8, 64, 16),), torch.randn(8, 64, 16)


X_TRANSFORMERS = {
    "Decoder": decoder,
    "Decoder rotary": lambda: decoder(rotary_pos_emb=True),
    "Decoder alibi": lambda: decoder(alibi_pos_bias=True),
    "Decoder T5 bias": lambda: decoder(rel_pos_bias=True),
    "Decoder GLU and RMSNorm": lambda: decoder(ff_glu=True, use_rmsnorm=True),
    "Decoder one key head": lambda: decoder(attn_one_kv_head=True),
    "Decoder residual attention": lambda: decoder(residual_attn=True),
    "XTransformer": encoder_decoder,
    "ContinuousTransformerWrapper": series,
}


def local_transformer() -> Made:
    """Attention to neighbouring windows."""
    from local_attention import LocalTransformer

    sizes = {"num_tokens": WORDS, "max_seq_len": 64, "local_attn_window_size": 16}
    network = LocalTransformer(dim=32, depth=2, heads=4, dim_head=8, **sizes)
    return Transposed(network), (torch.randint(0, WORDS, (8, 64)),), torch.randint(0, WORDS, (8, 64))


def graph(nodes: int = 2000, edges: int = 8000) -> torch.Tensor:
    """Random edges."""
    return torch.randint(0, nodes, (2, edges))


def of_graph(name: str, *given: Any, nodes: int = 2000, **sizes: Any) -> Made:
    """A model of torch_geometric that finds values of nodes."""
    import torch_geometric.nn.models

    network = getattr(torch_geometric.nn.models, name)(*given, **sizes)
    return network, (torch.randn(nodes, 32), graph(nodes)), torch.randn(nodes, 8)


def pna() -> Made:
    """Several aggregators, scaled by the degree."""
    degrees = torch.bincount(torch.bincount(graph()[1]))
    return of_graph(
        "PNA", 32, 32, 3, 8, aggregators=["mean", "max", "std"], scalers=["identity", "amplification"], deg=degrees
    )


def graph_unet() -> Made:
    """Pools nodes, and puts them back."""
    return of_graph("GraphUNet", 32, 32, 8, depth=2)


def schnet(name: str, **sizes: Any) -> Made:
    """A model of molecules."""
    from benchmarks.any_module import value_models

    module, batch = value_models.schnet()
    return (
        module.network,
        (batch[0], batch[1].to(torch.get_default_dtype()), batch[2]),
        batch[3].to(torch.get_default_dtype()),
    )


def attentive() -> Made:
    """Molecules as graphs with values of edges."""
    from torch_geometric.nn.models import AttentiveFP

    network = AttentiveFP(32, 32, 8, edge_dim=8, num_layers=3, num_timesteps=2)
    return (
        network,
        (torch.randn(2000, 32), graph(), torch.randn(8000, 8), torch.arange(2000) // 20),
        torch.randn(100, 8),
    )


DEPTH = {"in_channels": 32, "hidden_channels": 64, "num_layers": 4, "out_channels": 8}
GEOMETRIC = {
    "GCN": lambda: of_graph("GCN", **DEPTH),
    "GATv2": lambda: of_graph("GAT", **DEPTH, heads=4, v2=True),
    "GIN": lambda: of_graph("GIN", **DEPTH),
    "GraphSAGE": lambda: of_graph("GraphSAGE", **DEPTH),
    "EdgeCNN": lambda: of_graph("EdgeCNN", **DEPTH),
    "PNA": pna,
    "GraphUNet": graph_unet,
    "AttentiveFP": attentive,
    "SchNet": lambda: schnet("SchNet"),
    "PMLP": lambda: of_graph("PMLP", **DEPTH),
}


def adapted(kind: str, *, causal: bool = True, **options: Any) -> Made:
    """A model of transformers of which adapters are trained."""
    import peft

    from benchmarks.zoo import huggingface

    network, inputs, target = (huggingface.causal if causal else huggingface.masked)(kind, {})
    config = getattr(peft, options.pop("method", "LoraConfig"))(**options)
    return peft.get_peft_model(network, config), inputs, target


PEFT = {
    "LoRA of llama": lambda: adapted("llama", r=4, target_modules=["q_proj", "v_proj"]),
    "DoRA of llama": lambda: adapted("llama", r=4, target_modules=["q_proj", "v_proj"], use_dora=True),
    "IA3 of llama": lambda: adapted(
        "llama", method="IA3Config", target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "LoRA of bert": lambda: adapted("bert", causal=False, r=4, target_modules=["query", "value"]),
}


class LossOfCells(nn.Module):
    """Calls a module of scvi-tools, which takes a dict and returns three things, the last of which has the loss."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, **tensors: torch.Tensor) -> Any:
        """The parts of the loss."""
        return self.network(tensors)[2]


def vae() -> Made:
    """The module of scVI, on counts of 200 genes in 128 cells of two batches."""
    import scvi

    inputs = {"X": torch.randint(0, 9, (128, 200)).to(torch.get_default_dtype())}
    inputs |= {"batch": torch.randint(0, 2, (128, 1)), "labels": torch.zeros(128, 1, dtype=torch.long)}
    return LossOfCells(scvi.module.VAE(200, n_batch=2, n_hidden=64, n_layers=2)), inputs, None


def of_lightning() -> Made:
    """The transformer of Lightning's examples."""
    from lightning.pytorch.demos import Transformer

    network = Transformer(vocab_size=WORDS, ninp=64, nhead=4, nhid=128, nlayers=3)
    given = torch.randint(0, WORDS, (8, 64))
    return network, (given, given), given.new_zeros(0)


def encoder() -> Made:
    """torch's encoder."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    return nn.TransformerEncoder(layer, 3), (torch.randn(8, 64, 64),), torch.randn(8, 64, 64)


def both() -> Made:
    """torch's encoder and decoder."""
    network = nn.Transformer(64, 4, 2, 2, 128, batch_first=True)
    return network, (torch.randn(8, 64, 64), torch.randn(8, 32, 64)), torch.randn(8, 32, 64)


def lstm() -> Made:
    """torch's recurrence."""
    return nn.LSTM(32, 64, 3, batch_first=True), (torch.randn(16, 64, 32),), torch.randn(16, 64, 64)


TORCH = {"nn.TransformerEncoder": encoder, "nn.Transformer": both, "nn.LSTM": lstm}
CASES = [
    {f"x_transformers: {name}": Case("x_transformers", make) for name, make in X_TRANSFORMERS.items()},
    {f"torch_geometric: {name}": Case("torch_geometric", make) for name, make in GEOMETRIC.items()},
    {f"peft: {name}": Case("peft", make) for name, make in PEFT.items()},
    {"scvi: VAE": Case("scvi", vae)},
    {f"torch: {name}": Case("torch", make) for name, make in TORCH.items()},
    {"local_attention: LocalTransformer": Case("local_attention", local_transformer)},
]
