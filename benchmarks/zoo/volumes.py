"""Models of monai, segmentation_models_pytorch and diffusers: every pixel, and noise."""

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


UNET = {"in_channels": 1, "out_channels": 2, "channels": (8, 16, 32), "strides": (2, 2)}
KERNELS = {"kernel_size": [3, 3, 3], "strides": [1, 2, 2], "upsample_kernel_size": [2, 2], "filters": [8, 16, 32]}
MONAI = {
    "UNet 2D": lambda: of_monai("UNet", spatial_dims=2, num_res_units=2, **UNET),
    "UNet 3D": lambda: of_monai("UNet", spatial_dims=3, num_res_units=2, shape=SPACE, **UNET),
    "AttentionUnet 2D": lambda: of_monai("AttentionUnet", spatial_dims=2, **UNET),
    "BasicUNet 3D": lambda: of_monai("BasicUNet", spatial_dims=3, features=(4, 4, 8, 8, 16, 4), shape=(1, 1, 32, 32, 32)),
    "BasicUNetPlusPlus 2D": lambda: of_monai("BasicUNetPlusPlus", spatial_dims=2, features=(8, 8, 16, 32, 32, 8)),
    "SegResNet 2D": lambda: of_monai("SegResNet", spatial_dims=2, init_filters=8),
    "SegResNet 3D": lambda: of_monai("SegResNet", spatial_dims=3, init_filters=8, shape=SPACE),
    "DynUNet 3D": lambda: of_monai("DynUNet", 3, 1, 2, **KERNELS, shape=SPACE),
    "UNETR 3D": lambda: of_monai("UNETR", 1, 2, 32, feature_size=4, hidden_size=32, mlp_dim=64, num_heads=4, shape=(1, 1, 32, 32, 32)),
    "SwinUNETR 2D": lambda: of_monai("SwinUNETR", 1, 2, feature_size=12, spatial_dims=2),
    "HighResNet 2D": lambda: of_monai("HighResNet", spatial_dims=2, out_channels=2, shape=(1, 1, 48, 48)),
    "FlexibleUNet 2D": lambda: of_monai("FlexibleUNet", 1, 2, "efficientnet-b0", pretrained=False, decoder_channels=(64, 32, 16, 8, 8)),
    "AutoEncoder 2D": lambda: of_monai("AutoEncoder", 2, 1, 1, (8, 16, 32), (2, 2, 2), out=1),
    "VarAutoEncoder 2D": lambda: of_monai("VarAutoEncoder", 2, (1, 64, 64), 1, 16, (8, 16), (2, 2), out=1),
    "ViT 3D": lambda: of_monai("ViT", 1, 32, 8, hidden_size=48, mlp_dim=96, num_layers=3, num_heads=4, classification=True, num_classes=2, dense=False, shape=(8, 1, 32, 32, 32)),
    "ViTAutoEnc 3D": lambda: of_monai("ViTAutoEnc", 1, (24, 24, 24), (8, 8, 8), hidden_size=48, mlp_dim=96, num_layers=3, num_heads=4, deconv_chns=8, shape=SPACE, out=1),
    "DenseNet 3D": lambda: of_monai("DenseNet", 3, 1, 2, init_features=16, growth_rate=8, block_config=(2, 3, 3), dense=False, shape=SPACE),
    "ResNet 3D": lambda: of_monai("ResNet", "basic", [1, 1, 1, 1], [8, 16, 32, 32], n_input_channels=1, num_classes=2, dense=False, shape=(4, 1, 32, 32, 32)),
    "EfficientNetBN 2D": lambda: of_monai("EfficientNetBN", "efficientnet-b0", pretrained=False, spatial_dims=2, in_channels=1, num_classes=2, dense=False, shape=(8, 1, 64, 64)),
    "MedNeXt 3D": lambda: of_monai("MedNeXt", spatial_dims=3, init_filters=8, encoder_expansion_ratio=2, decoder_expansion_ratio=2, bottleneck_expansion_ratio=2, blocks_down=(1, 1), blocks_bottleneck=1, blocks_up=(1, 1), shape=SPACE),
    "VoxelMorphUNet 3D": lambda: of_monai("VoxelMorphUNet", 3, 2, 16, (8, 16), (16, 8), shape=(1, 2, 32, 32, 32), out=16),
    "DiffusionModelUNet 2D": lambda: noised_by_monai(),
}  # fmt: skip


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
    "MAnet": lambda: of_smp("MAnet", decoder_channels=UP),
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


DIFFUSERS = {
    "UNet2DModel": lambda: of_diffusers("UNet2DModel", {"sample": noise(4, 3, 32, 32), "timestep": when()}, noise(4, 3, 32, 32), sample_size=32, block_out_channels=(16, 32), layers_per_block=1, down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"), norm_num_groups=8),
    "UNet1DModel": lambda: of_diffusers("UNet1DModel", {"sample": noise(8, 8, 256), "timestep": when(8)}, None, in_channels=8, out_channels=8, sample_size=256, block_out_channels=(32, 32, 64), extra_in_channels=64),
    "UNet2DConditionModel": lambda: of_diffusers("UNet2DConditionModel", {"sample": noise(4, 4, 32, 32), "timestep": when(), "encoder_hidden_states": noise(4, 16, 32)}, noise(4, 4, 32, 32), sample_size=32, block_out_channels=(16, 32), layers_per_block=1, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), cross_attention_dim=32, attention_head_dim=8, norm_num_groups=8),
    "UNet3DConditionModel": lambda: of_diffusers("UNet3DConditionModel", {"sample": noise(2, 4, 4, 16, 16), "timestep": when(2), "encoder_hidden_states": noise(2, 16, 32)}, noise(2, 4, 4, 16, 16), sample_size=16, block_out_channels=(16, 32), layers_per_block=1, down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"), up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"), cross_attention_dim=32, attention_head_dim=8, norm_num_groups=8),
    "AutoencoderKL": lambda: of_diffusers("AutoencoderKL", {"sample": noise(2, 3, 48, 48)}, noise(2, 3, 48, 48), block_out_channels=(16, 32), down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, norm_num_groups=8),
    "VQModel": lambda: of_diffusers("VQModel", {"sample": noise(2, 3, 48, 48)}, noise(2, 3, 48, 48), block_out_channels=(16, 32), down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, norm_num_groups=8, num_vq_embeddings=64),
    "DiTTransformer2DModel": lambda: of_diffusers("DiTTransformer2DModel", {"hidden_states": noise(4, 4, 16, 16), "timestep": when(), "class_labels": torch.randint(0, 10, (4,))}, None, num_attention_heads=4, attention_head_dim=16, in_channels=4, num_layers=3, sample_size=16, num_embeds_ada_norm=100),
    "PixArtTransformer2DModel": lambda: of_diffusers("PixArtTransformer2DModel", {"hidden_states": noise(4, 4, 16, 16), "timestep": when(), "encoder_hidden_states": noise(4, 8, 32)}, None, num_attention_heads=4, attention_head_dim=16, in_channels=4, num_layers=3, sample_size=16, cross_attention_dim=64, caption_channels=32),
    "SD3Transformer2DModel": lambda: of_diffusers("SD3Transformer2DModel", {"hidden_states": noise(4, 4, 16, 16), "timestep": when(), "encoder_hidden_states": noise(4, 8, 32), "pooled_projections": noise(4, 32)}, None, sample_size=16, num_layers=3, attention_head_dim=16, num_attention_heads=4, caption_projection_dim=64, joint_attention_dim=32, pooled_projection_dim=32, in_channels=4, out_channels=4),
    "FluxTransformer2DModel": lambda: of_diffusers("FluxTransformer2DModel", {"hidden_states": noise(4, 64, 16), "timestep": torch.rand(4), "encoder_hidden_states": noise(4, 8, 32), "pooled_projections": noise(4, 32), "img_ids": torch.zeros(64, 3), "txt_ids": torch.zeros(8, 3)}, None, in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=4, joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8)),
    "SanaTransformer2DModel": lambda: of_diffusers("SanaTransformer2DModel", {"hidden_states": noise(4, 4, 16, 16), "timestep": when(), "encoder_hidden_states": noise(4, 8, 32)}, None, in_channels=4, out_channels=4, num_attention_heads=4, attention_head_dim=16, num_layers=3, num_cross_attention_heads=4, cross_attention_head_dim=16, cross_attention_dim=64, caption_channels=32, sample_size=16),
    "CogVideoXTransformer3DModel": lambda: of_diffusers("CogVideoXTransformer3DModel", {"hidden_states": noise(2, 4, 4, 16, 16), "timestep": when(2), "encoder_hidden_states": noise(2, 8, 32)}, None, num_attention_heads=4, attention_head_dim=16, in_channels=4, out_channels=4, time_embed_dim=16, text_embed_dim=32, num_layers=3, sample_width=16, sample_height=16, sample_frames=13, max_text_seq_length=8),
    "WanTransformer3DModel": lambda: of_diffusers("WanTransformer3DModel", {"hidden_states": noise(2, 4, 4, 16, 16), "timestep": when(2), "encoder_hidden_states": noise(2, 8, 32)}, None, num_attention_heads=4, attention_head_dim=16, in_channels=4, out_channels=4, text_dim=32, freq_dim=32, ffn_dim=128, num_layers=3),
    "LTXVideoTransformer3DModel": lambda: of_diffusers("LTXVideoTransformer3DModel", {"hidden_states": noise(2, 128, 16), "timestep": when(2), "encoder_hidden_states": noise(2, 8, 64), "encoder_attention_mask": torch.ones(2, 8), "num_frames": 2, "height": 8, "width": 8}, None, in_channels=16, out_channels=16, num_attention_heads=4, attention_head_dim=16, cross_attention_dim=64, num_layers=3, caption_channels=64),
    "StableAudioDiTModel": lambda: of_diffusers("StableAudioDiTModel", {"hidden_states": noise(4, 8, 64), "timestep": torch.rand(4), "encoder_hidden_states": noise(4, 8, 32), "global_hidden_states": noise(4, 1, 64)}, None, sample_size=64, in_channels=8, out_channels=8, num_layers=3, attention_head_dim=16, num_attention_heads=4, num_key_value_attention_heads=2, cross_attention_dim=32, cross_attention_input_dim=32, global_states_input_dim=64, time_proj_dim=32),
}  # fmt: skip
CASES = [
    {f"monai: {name}": Case("monai", make) for name, make in MONAI.items()},
    {f"smp: {name}": Case("segmentation_models_pytorch", make) for name, make in SMP.items()},
    {f"diffusers: {name}": Case("diffusers", make) for name, make in DIFFUSERS.items()},
]
