"""All cases of the zoo by name, "library: model", in an order in which libraries alternate."""

from benchmarks.zoo import huggingface, images, others, volumes
from benchmarks.zoo.subject import Case

GROUPS = (huggingface.CASES, *images.CASES, *volumes.CASES, *others.CASES)


def alternating(groups: tuple[dict[str, Case], ...]) -> dict[str, Case]:
    """A part of the cases is like all of them: those of a group are evenly spread."""
    places = [((k + 0.5) / len(group), name, case) for group in groups for k, (name, case) in enumerate(group.items())]
    return {name: case for _, name, case in sorted(places, key=lambda one: one[:2])}


CASES = alternating(GROUPS)
QUICK = (
    *("torch: nn.TransformerEncoder", "local_attention: LocalTransformer", "transformers: gpt2", "timm: test_vit"),
    *(
        "monai: UNet 2D",
        "smp: Linknet",
        "diffusers: DiTTransformer2DModel",
        "vit_pytorch: ViT",
        "torchvision: densenet",
    ),
    *("x_transformers: Decoder", "torch_geometric: GIN", "peft: LoRA of llama", "scvi: VAE"),
)
"""One of each library; the tests have the packages of the first two."""
PREDICTED = (
    *("transformers: gpt2", "vit_pytorch: ViT", "torch_geometric: GCN", "transformers: t5", "monai: UNet 2D"),
    *(
        "x_transformers: Decoder",
        "timm: test_efficientnet",
        "transformers: llama",
        "smp: Linknet",
        "transformers: bert",
    ),
    *(
        "diffusers: UNet2DModel",
        "torchvision: squeezenet1_1",
        "transformers: wav2vec2",
        "timm: test_vit",
        "peft: LoRA of llama",
    ),
    *("transformers: vit", "timm: test_convnext", "torch: nn.TransformerEncoder", "torch_geometric: GATv2"),
    *("transformers: distilbert", "vit_pytorch: CaiT", "timm: test_resnet", "torchvision: resnet"),
    *("transformers: opt", "transformers: mixtral", "smp: Unet", "transformers: segformer"),
    *("monai: SegResNet 3D", "transformers: switch_transformers", "transformers: mamba2"),
)
"""Those that are trained with four optimizers."""
