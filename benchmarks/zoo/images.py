"""Models of timm, torchvision and vit_pytorch: labels of images and videos, and of every pixel."""

import importlib
from typing import Any

import torch

from benchmarks.zoo.subject import Case, Made

LABELS = 10


def labels(n: int) -> torch.Tensor:
    """One for every image."""
    return torch.randint(0, LABELS, (n,))


def of_timm(name: str, n: int = 8, side: int = 64, *, sized: bool = False, **sizes: Any) -> Made:
    """A model of timm's registry; `sized` ones are made for a side."""
    import timm

    if sized:
        sizes["img_size"] = side
    network = timm.create_model(name, pretrained=False, num_classes=LABELS, **sizes)
    return network, (torch.randn(n, 3, side, side),), labels(n)


def volo() -> Made:
    """A small VOLO; the functions of timm's registry take no sizes of it."""
    from timm.models.volo import VOLO

    network = VOLO([1, 1, 1, 1], 64, num_classes=LABELS, embed_dims=[32, 64, 64, 64], num_heads=[2, 4, 4, 4])
    return network, (torch.randn(8, 3, 64, 64),), labels(8)


TIMM: dict[str, dict[str, Any]] = {
    # timm's own small models, one of a family
    "test_vit": {"side": 160, "n": 16},
    "test_resnet": {"n": 16},
    "test_efficientnet": {"side": 96},
    "test_convnext": {"n": 16},
    "test_byobnet": {"n": 16},
    "test_nfnet": {"side": 96},
    "test_mambaout": {"n": 16},
    "test_coatnet": {"side": 160, "n": 4},
    "test_maxvit": {"side": 160, "n": 4},
    "test_vit_relpos": {"side": 160},
    # families whose smallest model is small, or has sizes as options
    "swin_tiny_patch4_window7_224": {
        "sized": True,
        "side": 64,
        "window_size": 4,
        "embed_dim": 24,
        "depths": (2, 2),
        "num_heads": (2, 4),
    },
    "swinv2_tiny_window8_256": {
        "sized": True,
        "side": 64,
        "window_size": 4,
        "embed_dim": 24,
        "depths": (2, 2),
        "num_heads": (2, 4),
    },
    "deit3_small_patch16_224": {"sized": True, "patch_size": 8, "embed_dim": 64, "depth": 3, "num_heads": 4},
    "eva02_tiny_patch14_224": {"sized": True, "side": 56, "patch_size": 7, "embed_dim": 48, "depth": 3, "num_heads": 4},
    "cait_xxs24_224": {"sized": True, "patch_size": 8, "embed_dim": 48, "depth": 3, "num_heads": 4},
    "xcit_nano_12_p8_224": {"sized": True, "embed_dim": 32, "depth": 3, "num_heads": 4},
    "beit_base_patch16_224": {"sized": True, "patch_size": 8, "embed_dim": 64, "depth": 3, "num_heads": 4},
    "convit_tiny": {"sized": True, "patch_size": 8, "embed_dim": 48, "depth": 4, "num_heads": 4},
    "pit_ti_224": {
        "sized": True,
        "side": 64,
        "patch_size": 8,
        "stride": 4,
        "base_dims": [16, 16, 16],
        "depth": [1, 2, 1],
    },
    "mobilenetv3_small_050": {"side": 96, "n": 16},
    "lcnet_035": {"side": 96, "n": 16},
    "ghostnet_050": {"side": 96},
    "efficientnet_lite0": {"side": 96},
    "mnasnet_small": {"side": 96},
    "rexnet_100": {"side": 96, "width_mult": 0.3},
    "regnetx_002": {"side": 96},
    "edgenext_xx_small": {"side": 96},
    "mobilevit_xxs": {"side": 96},
    "starnet_s050": {"side": 96},
    "densenet121": {"side": 96, "n": 4, "growth_rate": 8, "block_config": (3, 4, 4), "init_features": None},
    "dla46_c": {"side": 96},
    "hrnet_w18_small": {"side": 64, "n": 2},
    "resnetv2_18": {"side": 96, "layers": (1, 1, 1, 1), "channels": (32, 32, 64, 64)},
    "pvt_v2_b0": {"side": 96},
    "sequencer2d_s": {
        "embed_dims": [32, 32, 32, 32],
        "layers": [1, 1, 1, 1],
        "hidden_sizes": [8, 8, 8, 8],
        "side": 112,
    },
    "repvit_m0_9": {"embed_dim": (16, 32, 48, 64), "depth": (1, 1, 1, 1)},
    "fastvit_t8": {"embed_dims": (16, 32, 64, 128), "layers": (1, 1, 1, 1)},
    "tnt_s_patch16_224": {
        "sized": True,
        "side": 64,
        "patch_size": 16,
        "embed_dim": 64,
        "inner_dim": 16,
        "depth": 3,
        "num_heads_inner": 2,
        "num_heads_outer": 4,
    },
}
"""By name: n images, their side, and sizes of the network."""


def of_torchvision(name: str, n: int = 8, side: int = 64, **sizes: Any) -> Made:
    """A classifier of torchvision."""
    import torchvision

    network = torchvision.models.get_model(name, weights=None, num_classes=LABELS, **sizes)
    return network, (torch.randn(n, 3, side, side),), labels(n)


def of_videos(name: str, n: int = 2, frames: int = 8, side: int = 56, **sizes: Any) -> Made:
    """A classifier of videos."""
    import torchvision

    network = torchvision.models.get_model(name, weights=None, num_classes=LABELS, **sizes)
    return network, (torch.randn(n, 3, frames, side, side),), labels(n)


def of_pixels(name: str, n: int = 4, side: int = 96, **sizes: Any) -> Made:
    """A segmentation network of torchvision."""
    import torchvision

    network = torchvision.models.get_model(name, weights=None, weights_backbone=None, num_classes=LABELS, **sizes)
    return network, (torch.randn(n, 3, side, side),), torch.randint(0, LABELS, (n, side, side))


def of_class(name: str, *given: Any, n: int = 8, side: int = 64, **sizes: Any) -> Made:
    """A class of torchvision whose sizes are smaller than those of its registry."""
    import torchvision

    network = getattr(torchvision.models, name)(*given, num_classes=LABELS, **sizes)
    return network, (torch.randn(n, 3, side, side),), labels(n)


def small_resnet() -> Made:
    """A ResNet of one block a stage."""
    from torchvision.models.resnet import BasicBlock

    return of_class("ResNet", BasicBlock, [1, 1, 1, 1], n=24, side=96)


def small_convnext() -> Made:
    """Three stages."""
    from torchvision.models.convnext import CNBlockConfig

    return of_class("ConvNeXt", [CNBlockConfig(16, 32, 1), CNBlockConfig(32, 64, 1), CNBlockConfig(64, None, 1)])


TORCHVISION = {
    "squeezenet1_1": lambda: of_torchvision("squeezenet1_1", n=8, side=128),
    "mobilenet_v2": lambda: of_torchvision("mobilenet_v2", side=96, width_mult=0.35),
    "mobilenet_v3_small": lambda: of_torchvision("mobilenet_v3_small", side=128, width_mult=0.5),
    "mnasnet0_5": lambda: of_torchvision("mnasnet0_5", side=96),
    "shufflenet_v2_x0_5": lambda: of_torchvision("shufflenet_v2_x0_5", side=128),
    "googlenet": lambda: of_torchvision("googlenet", n=6, side=128, aux_logits=False, init_weights=False),
    "regnet_y_400mf": lambda: of_torchvision("regnet_y_400mf", side=96),
    "efficientnet_b0": lambda: of_torchvision("efficientnet_b0", n=4, side=96),
    "densenet": lambda: of_class("DenseNet", 8, (3, 4, 4), 16, side=96),
    "resnet": small_resnet,
    "convnext": small_convnext,
    "vit": lambda: of_class("VisionTransformer", 64, 8, 3, 4, 64, 128),
    "swin": lambda: of_class("SwinTransformer", [4, 4], 24, [2, 2], [2, 4], [4, 4]),
    "maxvit": lambda: of_class("MaxVit", (64, 64), 16, 4, [16, 32], [1, 1], 8, 0.0),
    "deeplabv3_mobilenet_v3_large": lambda: of_pixels("deeplabv3_mobilenet_v3_large"),
    "lraspp_mobilenet_v3_large": lambda: of_pixels("lraspp_mobilenet_v3_large"),
    "swin3d": lambda: of_video_class("SwinTransformer3d", [2, 4, 4], 24, [2, 2], [2, 4], [4, 4, 4]),
}


def of_video_class(name: str, *given: Any) -> Made:
    """A class of torchvision for videos."""
    import torchvision

    network = getattr(torchvision.models.video.swin_transformer, name)(*given, num_classes=LABELS)
    return network, (torch.randn(2, 3, 8, 64, 64),), labels(2)


def of_vit_pytorch(file: str, name: str, *shape: int, **sizes: Any) -> Made:
    """A class of a file of vit_pytorch."""
    network = getattr(importlib.import_module(f"vit_pytorch.{file}"), name)(num_classes=LABELS, **sizes)
    shape = shape or (8, 3, 64, 64)
    return network, (torch.randn(*shape),), labels(shape[0])


USUAL = {"image_size": 64, "patch_size": 8, "dim": 64, "depth": 3, "heads": 4, "mlp_dim": 128}
VIT_PYTORCH = {
    "ViT": lambda: of_vit_pytorch("vit", "ViT", **USUAL),
    "DeepViT": lambda: of_vit_pytorch("deepvit", "DeepViT", **USUAL),
    "CaiT": lambda: of_vit_pytorch("cait", "CaiT", **USUAL, cls_depth=1),
    "CCT": lambda: of_vit_pytorch(
        "cct", "CCT", img_size=64, embedding_dim=64, num_layers=3, num_heads=4, mlp_ratio=2.0
    ),
    "PiT": lambda: of_vit_pytorch("pit", "PiT", image_size=64, patch_size=8, dim=32, depth=(1, 2), heads=4, mlp_dim=64),
    "LeViT": lambda: of_vit_pytorch(
        "levit", "LeViT", 16, 3, 64, 64, image_size=64, dim=(32, 48, 64), depth=1, heads=(2, 3, 4), mlp_mult=2
    ),
    "CvT": lambda: of_vit_pytorch("cvt", "CvT", s1_emb_dim=16, s2_emb_dim=32, s3_emb_dim=64, s3_depth=2, s3_heads=4),
    "RegionViT": lambda: of_vit_pytorch(
        "regionvit", "RegionViT", 4, 3, 112, 112, dim=(16, 32, 64, 64), depth=(1, 1, 1, 1)
    ),
    "NesT": lambda: of_vit_pytorch(
        "nest", "NesT", image_size=64, patch_size=4, dim=32, heads=2, num_hierarchies=2, block_repeats=(1, 2)
    ),
    "MaxViT": lambda: of_vit_pytorch(
        "max_vit", "MaxViT", 4, 3, 112, 112, dim_conv_stem=16, dim=16, dim_head=8, depth=(1, 1), window_size=7
    ),
    "XCiT": lambda: of_vit_pytorch("xcit", "XCiT", **USUAL, cls_depth=1),
    "SepViT": lambda: of_vit_pytorch(
        "sep_vit", "SepViT", 4, 3, 56, 56, dim=32, dim_head=16, heads=(1, 2), depth=(1, 1), window_size=7
    ),
    "ViT 3D": lambda: of_vit_pytorch(
        "vit_3d",
        "ViT",
        4,
        3,
        16,
        32,
        32,
        image_size=32,
        image_patch_size=8,
        frames=16,
        frame_patch_size=2,
        dim=64,
        depth=3,
        heads=4,
        mlp_dim=128,
    ),
}
CASES = [
    {
        f"timm: {name}": Case("timm", lambda name=name, sizes=sizes: of_timm(name, **sizes))
        for name, sizes in TIMM.items()
    }
    | {"timm: VOLO": Case("timm", volo)},
    {f"torchvision: {name}": Case("torchvision", make) for name, make in TORCHVISION.items()},
    {f"vit_pytorch: {name}": Case("vit_pytorch", make) for name, make in VIT_PYTORCH.items()},
]
