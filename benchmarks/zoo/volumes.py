"""Models of monai, segmentation_models_pytorch and diffusers: every pixel, and noise."""

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.zoo.subject import Case, Made

PLANE, SPACE = (4, 1, 64, 64), (1, 1, 24, 24, 24)


def of_monai(
    name: str, *given: Any, shape: tuple[int, ...] = PLANE, out: int = 2, dense: bool = True, **sizes: Any
) -> Made:
    """A network of monai; a dense one is trained on noise of the shape of its result."""
    import monai.networks.nets

    network = getattr(monai.networks.nets, name)(*given, **sizes)
    target = torch.randn(shape[0], out, *shape[2:]) if dense else torch.randint(0, out, shape[:1])
    return network, (torch.randn(*shape),), target


def noised_by_monai() -> Made:
    """A network that is told the time of the noise."""
    from monai.networks.nets import DiffusionModelUNet

    network = DiffusionModelUNet(
        2,
        1,
        1,
        channels=(16, 32),
        attention_levels=(False, True),
        num_head_channels=16,
        num_res_blocks=1,
        norm_num_groups=8,
    )
    return network, (torch.randn(4, 1, 32, 32), torch.randint(0, 100, (4,))), torch.randn(4, 1, 32, 32)


UNET = {"in_channels": 1, "out_channels": 2, "channels": (8, 16, 32), "strides": (2, 2)}
KERNELS = {"kernel_size": [3, 3, 3], "strides": [1, 2, 2], "upsample_kernel_size": [2, 2], "filters": [8, 16, 32]}
THIN = {"hidden_size": 48, "mlp_dim": 96, "num_heads": 4}
RATIOS = dict.fromkeys((f"{part}_expansion_ratio" for part in ("encoder", "decoder", "bottleneck")), 2)
CUBE, LABELLED = (1, 1, 32, 32, 32), {"dense": False, "num_classes": 2}
MONAI: dict[str, Callable[[], Made]] = {
    "UNet 2D": lambda: of_monai("UNet", spatial_dims=2, num_res_units=2, **UNET),
    "UNet 3D": lambda: of_monai("UNet", spatial_dims=3, num_res_units=2, shape=SPACE, **UNET),
    "AttentionUnet 2D": lambda: of_monai("AttentionUnet", spatial_dims=2, **UNET),
    "BasicUNet 3D": lambda: of_monai("BasicUNet", spatial_dims=3, features=(4, 4, 8, 8, 16, 4), shape=CUBE),
    "BasicUNetPlusPlus 2D": lambda: of_monai("BasicUNetPlusPlus", spatial_dims=2, features=(8, 8, 16, 32, 32, 8)),
    "SegResNet 2D": lambda: of_monai("SegResNet", spatial_dims=2, init_filters=8),
    "SegResNet 3D": lambda: of_monai("SegResNet", spatial_dims=3, init_filters=8, shape=(2, *SPACE[1:])),
    "DynUNet 3D": lambda: of_monai("DynUNet", 3, 1, 2, **KERNELS, shape=SPACE),
    "UNETR 3D": lambda: of_monai("UNETR", 1, 2, 32, feature_size=4, **THIN, shape=CUBE),
    "SwinUNETR 2D": lambda: of_monai("SwinUNETR", 1, 2, feature_size=12, spatial_dims=2),
    "HighResNet 2D": lambda: of_monai("HighResNet", spatial_dims=2, out_channels=2, shape=(1, 1, 48, 48)),
    "FlexibleUNet 2D": lambda: of_monai(
        "FlexibleUNet", 1, 2, "efficientnet-b0", pretrained=False, decoder_channels=(64, 32, 16, 8, 8),
        shape=(4, 1, 96, 96),
    ),
    "AutoEncoder 2D": lambda: of_monai("AutoEncoder", 2, 1, 1, (8, 16, 32), (2, 2, 2), out=1),
    "VarAutoEncoder 2D": lambda: of_monai("VarAutoEncoder", 2, (1, 64, 64), 1, 16, (8, 16), (2, 2), out=1),
    "ViT 3D": lambda: of_monai(
        "ViT", 1, 32, 8, **THIN, num_layers=3, classification=True, **LABELLED, shape=(8, *CUBE[1:])
    ),
    "DenseNet 3D": lambda: of_monai("DenseNet", 3, 1, 2, 16, 8, (2, 3, 3), dense=False, shape=CUBE),
    "ResNet 3D": lambda: of_monai(
        "ResNet", "basic", [1, 1, 1, 1], [8, 16, 32, 32], n_input_channels=1, **LABELLED, shape=(4, *CUBE[1:])
    ),
    "EfficientNetBN 2D": lambda: of_monai(
        "EfficientNetBN", "efficientnet-b0", pretrained=False, spatial_dims=2, in_channels=1,
        **LABELLED, shape=(8, 1, 64, 64),
    ),
    "MedNeXt 3D": lambda: of_monai(
        "MedNeXt", spatial_dims=3, init_filters=8, **RATIOS,
        blocks_down=(1, 1), blocks_bottleneck=1, blocks_up=(1, 1), shape=SPACE,
    ),
    "VoxelMorphUNet 3D": lambda: of_monai(
        "VoxelMorphUNet", 3, 2, 16, (8, 16), (16, 8), shape=(1, 2, 32, 32, 32), out=3
    ),
    "DiffusionModelUNet 2D": noised_by_monai,
}  # fmt: skip


def of_smp(
    name: str, encoder: str = "timm-mobilenetv3_small_minimal_100", n: int = 4, side: int = 96, **sizes: Any
) -> Made:
    """A segmentation network with a small encoder."""
    import segmentation_models_pytorch

    network = getattr(segmentation_models_pytorch, name)(encoder, encoder_weights=None, classes=4, **sizes)
    return network, (torch.randn(n, 3, side, side),), torch.randint(0, 4, (n, side, side))


UP = (32, 16, 16, 8, 8)
SMP = {
    "Unet": lambda: of_smp("Unet", "mobilenet_v2", decoder_channels=UP),
    "UnetPlusPlus": lambda: of_smp("UnetPlusPlus", decoder_channels=UP),
    # without the deepest features, with which most of the bytes would be parameters
    "MAnet": lambda: of_smp("MAnet", encoder_depth=4, decoder_channels=UP[:4]),
    "Linknet": lambda: of_smp("Linknet"),
    "FPN": lambda: of_smp("FPN", decoder_pyramid_channels=32, decoder_segmentation_channels=32),
    "PSPNet": lambda: of_smp("PSPNet", psp_out_channels=32),
    "PAN": lambda: of_smp("PAN", decoder_channels=16, side=128),
    "DeepLabV3": lambda: of_smp("DeepLabV3", decoder_channels=16),
    "DeepLabV3Plus": lambda: of_smp("DeepLabV3Plus", decoder_channels=16),
    "UPerNet": lambda: of_smp("UPerNet", decoder_channels=32),
    "Segformer": lambda: of_smp("Segformer", decoder_segmentation_channels=32),
}


def of_diffusers(name: str, inputs: dict[str, Any], target: Any = None, **sizes: Any) -> Made:
    """A network of diffusers; its result is trained to be noise, or small."""
    import diffusers

    return getattr(diffusers, name)(**sizes), inputs, target


def noise(*shape: int) -> torch.Tensor:
    """Of a normal distribution."""
    return torch.randn(*shape)


def when(n: int = 4) -> torch.Tensor:
    """Times."""
    return torch.randint(0, 1000, (n,))


def told(x: torch.Tensor, *words: int, **more: torch.Tensor) -> dict[str, Any]:
    """Inputs of a transformer of diffusers: noise, times, and texts as vectors."""
    texts = {"encoder_hidden_states": noise(len(x), *words)} if words else {}
    return {"hidden_states": x, "timestep": when(len(x)), **texts, **more}


def unet(name: str, x: torch.Tensor, down: str, up: str, inputs: dict[str, Any], **sizes: Any) -> Made:
    """Two levels, of which one attends."""
    plain = {"down": f"DownBlock{down[-2:]}", "up": f"UpBlock{up[-2:]}"}
    small = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8, "attention_head_dim": 8}
    blocks = {"down_block_types": (down, plain["down"]), "up_block_types": (plain["up"], up)}
    given = {"sample": x, "timestep": when(len(x)), **inputs}
    return of_diffusers(name, given, torch.randn_like(x), sample_size=x.shape[-1], **small, **blocks, **sizes)


def autoencoder(name: str, **sizes: Any) -> Made:
    """Two levels."""
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    x = noise(2, 3, 48, 48)
    return of_diffusers(name, {"sample": x}, x, block_out_channels=(16, 32), norm_num_groups=8, **blocks, **sizes)


HEADS = {"num_attention_heads": 4, "attention_head_dim": 16}
LAYERS = {**HEADS, "num_layers": 3, "in_channels": 4}
CROSS, WORDS = {"cross_attention_dim": 32}, (8, 32)


def pictures(n: int = 4) -> torch.Tensor:
    """Latents of pictures."""
    return noise(n, 4, 16, 16)


def films(channels: int = 4) -> torch.Tensor:
    """Latents of two films of four frames."""
    return noise(2, channels, 4, 16, 16)


def flux() -> Made:
    """Pictures as a sequence, with places."""
    places = {"img_ids": torch.zeros(64, 3), "txt_ids": torch.zeros(8, 3), "pooled_projections": noise(4, 32)}
    given = told(noise(4, 64, 16), *WORDS, **places) | {"timestep": torch.rand(4)}
    sizes = {**HEADS, "in_channels": 16, "num_layers": 2, "num_single_layers": 2, "axes_dims_rope": (4, 4, 8)}
    return of_diffusers("FluxTransformer2DModel", given, **sizes, joint_attention_dim=32, pooled_projection_dim=32)


def sd3() -> Made:
    """Pictures and texts in one attention."""
    sizes = {**LAYERS, "sample_size": 16, "caption_projection_dim": 64, "joint_attention_dim": 32, "out_channels": 4}
    given = told(pictures(), *WORDS, pooled_projections=noise(4, 32))
    return of_diffusers("SD3Transformer2DModel", given, **sizes, pooled_projection_dim=32)


def sana() -> Made:
    """Linear attention."""
    sizes = {**LAYERS, **CROSS, "out_channels": 4, "sample_size": 16, "caption_channels": 32, "cross_attention_dim": 64}
    given = told(pictures(), *WORDS)
    return of_diffusers(
        "SanaTransformer2DModel", given, **sizes, num_cross_attention_heads=4, cross_attention_head_dim=16
    )


def cogvideo() -> Made:
    """Films and texts in one attention."""
    sizes = {**LAYERS, "out_channels": 4, "time_embed_dim": 16, "text_embed_dim": 32, "max_text_seq_length": 8}
    sides = {"sample_width": 16, "sample_height": 16, "sample_frames": 13}
    # frames come before channels
    return of_diffusers("CogVideoXTransformer3DModel", told(films(), *WORDS), **sizes, **sides)


def ltx() -> Made:
    """Films as a sequence."""
    given = told(noise(2, 128, 16), 8, 64, encoder_attention_mask=torch.ones(2, 8))
    sizes = {**HEADS, "num_layers": 3, "in_channels": 16, "out_channels": 16, "cross_attention_dim": 64}
    given |= {"num_frames": 2, "height": 8, "width": 8}
    return of_diffusers("LTXVideoTransformer3DModel", given, **sizes, caption_channels=64)


def stable_audio() -> Made:
    """Sounds."""
    given = told(noise(4, 8, 64), *WORDS, global_hidden_states=noise(4, 1, 64)) | {"timestep": torch.rand(4)}
    sizes = {**HEADS, **CROSS, "num_layers": 3, "in_channels": 8, "out_channels": 8, "num_key_value_attention_heads": 2}
    inner = {"cross_attention_input_dim": 32, "global_states_input_dim": 64, "time_proj_dim": 32}
    return of_diffusers("StableAudioDiTModel", given, sample_size=64, **sizes, **inner)


DIFFUSERS: dict[str, Callable[[], Made]] = {
    "UNet2DModel": lambda: unet("UNet2DModel", noise(4, 3, 32, 32), "AttnDownBlock2D", "AttnUpBlock2D", {}),
    "UNet2DConditionModel": lambda: unet(
        "UNet2DConditionModel", noise(2, 4, 32, 32), "CrossAttnDownBlock2D", "CrossAttnUpBlock2D",
        {"encoder_hidden_states": noise(2, 16, 32)}, **CROSS,
    ),
    "UNet3DConditionModel": lambda: unet(
        "UNet3DConditionModel", noise(2, 4, 4, 16, 16), "CrossAttnDownBlock3D", "CrossAttnUpBlock3D",
        {"encoder_hidden_states": noise(2, 16, 32)}, **CROSS,
    ),
    "UNet1DModel": lambda: of_diffusers(
        "UNet1DModel", {"sample": noise(8, 8, 256), "timestep": when(8)},
        in_channels=8, out_channels=8, sample_size=256, block_out_channels=(32, 32, 64), extra_in_channels=64,
    ),
    "AutoencoderKL": lambda: autoencoder("AutoencoderKL"),
    "VQModel": lambda: autoencoder("VQModel", num_vq_embeddings=64),
    "DiTTransformer2DModel": lambda: of_diffusers(
        "DiTTransformer2DModel", told(pictures(), class_labels=torch.randint(0, 10, (4,))),
        **LAYERS, sample_size=16, num_embeds_ada_norm=100,
    ),
    "PixArtTransformer2DModel": lambda: of_diffusers(
        "PixArtTransformer2DModel", told(pictures(), *WORDS),
        **LAYERS, sample_size=16, cross_attention_dim=64, caption_channels=32,
    ),
    "WanTransformer3DModel": lambda: of_diffusers(
        "WanTransformer3DModel", told(films(), *WORDS),
        **LAYERS, out_channels=4, text_dim=32, freq_dim=32, ffn_dim=128,
    ),
    "SD3Transformer2DModel": sd3, "FluxTransformer2DModel": flux, "SanaTransformer2DModel": sana,
    "CogVideoXTransformer3DModel": cogvideo, "LTXVideoTransformer3DModel": ltx, "StableAudioDiTModel": stable_audio,
}  # fmt: skip
CASES = [
    {f"monai: {name}": Case("monai", make) for name, make in MONAI.items()},
    {f"smp: {name}": Case("segmentation_models_pytorch", make) for name, make in SMP.items()},
    {f"diffusers: {name}": Case("diffusers", make) for name, make in DIFFUSERS.items()},
]
