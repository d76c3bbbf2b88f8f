"""Models of transformers, by the name of their type in `AutoConfig`: text, images, sound, series."""

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.zoo.subject import Case, Made

WORDS, LENGTH, TEXTS = 200, 64, 8
SMALL = {
    **{"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128},
    **{"vocab_size": WORDS, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}


def network(kind: str, head: str, sizes: dict[str, Any]) -> Any:
    """A model with random weights; `head` is what follows "AutoModel" in the name of its class."""
    import transformers

    config = transformers.AutoConfig.for_model(kind, **sizes)
    # caches are for writing text, not for training
    config.use_cache = False
    return getattr(transformers, f"AutoModel{head}").from_config(config)


def words(length: int = LENGTH) -> torch.Tensor:
    """Texts without special words."""
    return torch.randint(4, WORDS, (TEXTS, length))


def causal(kind: str, sizes: dict[str, Any]) -> Made:
    """The next word."""
    given = words()
    return network(kind, "ForCausalLM", SMALL | sizes), {"input_ids": given, "labels": given}, None


def masked(kind: str, sizes: dict[str, Any]) -> Made:
    """Words at a third of the places."""
    given = words()
    labels = given.where(torch.rand(given.shape) < 0.3, -100)
    return network(kind, "ForMaskedLM", SMALL | sizes), {"input_ids": given, "labels": labels}, None


def translated(kind: str, sizes: dict[str, Any]) -> Made:
    """A text from another."""
    small = SMALL | {
        **{"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128},
        **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_start_token_id": 1},
    }
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"):
        small.pop(name)
    return network(kind, "ForSeq2SeqLM", small | sizes), {"input_ids": words(), "labels": words(32)}, None


def images(kind: str, sizes: dict[str, Any]) -> Made:
    """Labels of images."""
    sizes = {"num_labels": 10, **sizes}
    side, n = sizes.pop("side", 64), sizes.pop("n", 8)
    given = {"pixel_values": torch.randn(n, sizes.get("num_channels", 3), side, side)}
    return network(kind, "ForImageClassification", sizes), given, torch.randint(0, 10, (n,))


def sounds(kind: str, sizes: dict[str, Any]) -> Made:
    """Letters of speech, by connectionist temporal classification."""
    small = {
        **{"vocab_size": 30, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4},
        **{"intermediate_size": 128, "conv_dim": (32,) * 3, "conv_stride": (5, 2, 2), "conv_kernel": (10, 3, 3)},
        **{"num_feat_extract_layers": 3, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4},
        **{"layerdrop": 0.0, "mask_time_prob": 0.0, "pad_token_id": 0},
    }
    labels = torch.randint(1, 30, (8, 12))
    return network(kind, "ForCTC", small | sizes), {"input_values": torch.randn(8, 3200), "labels": labels}, None


EAGER = {"experts_implementation": "eager"}
"""Grouped products have no float64."""
FEW = {"num_key_value_heads": 2}
SEVERAL = {**EAGER, "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4}
VIT = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "image_size": 64,
    "patch_size": 8,
}
WINDOWS = {"image_size": 64, "embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
STAGES = {"hidden_sizes": [16, 32, 64], "depths": [1, 1, 1]}
T5 = {"d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
MLA = {"kv_lora_rank": 16, "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
KINDS: dict[Callable[[str, dict[str, Any]], Made], dict[str, dict[str, Any]]] = {
    causal: {
        "gpt2": {},
        "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_hidden_layers": 4},
        "gpt_neox": {},
        "gptj": {"rotary_dim": 8},
        "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64},
        "bloom": {},
        "llama": {},
        "qwen3": {**FEW, "head_dim": 16},
        "gemma2": {**FEW, "head_dim": 16},
        "gemma3_text": {**FEW, "head_dim": 16},
        "phi3": {},
        "falcon": {},
        "olmo2": {},
        "glm": {**FEW, "head_dim": 16},
        "codegen": {"rotary_dim": 8},
        # mixtures of experts
        "mixtral": SEVERAL,
        "olmoe": SEVERAL,
        "granitemoe": SEVERAL,
        "gpt_oss": {**SEVERAL, "head_dim": 16},
        "qwen2_moe": {**SEVERAL, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
        "qwen3_moe": {**SEVERAL, "moe_intermediate_size": 64, "head_dim": 16},
        "deepseek_v3": {
            **SEVERAL,
            **MLA,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 1,
        },
        # state spaces and other recurrences
        "mamba": {"state_size": 4, "num_hidden_layers": 2},
        "falcon_mamba": {"state_size": 4, "num_hidden_layers": 2},
        "mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 16, "n_groups": 1, "chunk_size": 16},
        "rwkv": {"attention_hidden_size": 64, "num_hidden_layers": 2},
        "recurrent_gemma": {"lru_width": 64, "attention_window_size": 32, "num_key_value_heads": 1},
        "jamba": {
            **SEVERAL,
            "use_mamba_kernels": False,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "expert_layer_period": 3,
            "expert_layer_offset": 1,
            "mamba_d_state": 4,
            "mamba_dt_rank": 8,
        },
    },
    masked: {
        "bert": {},
        "roberta": {"pad_token_id": 1, "max_position_embeddings": 130},
        "albert": {"embedding_size": 32},
        "electra": {"embedding_size": 32},
        "deberta-v2": {"pos_att_type": ["c2p", "p2c"], "relative_attention": True},
        "distilbert": {"dim": 64, "n_layers": 3, "n_heads": 4, "hidden_dim": 128},
        "mpnet": {},
        "convbert": {"embedding_size": 64},
        "mobilebert": {"embedding_size": 64, "intra_bottleneck_size": 32, "true_hidden_size": 32},
        "fnet": {},
        "longformer": {"attention_window": 16},
        "big_bird": {"block_size": 8, "num_random_blocks": 2, "attention_type": "block_sparse"},
        "nystromformer": {"num_landmarks": 8, "segment_means_seq_len": 64},
        "roformer": {},
        "esm": {"mask_token_id": 3},
        "modernbert": {"global_attn_every_n_layers": 2, "local_attention": 16},
        "xlm": {"emb_dim": 64, "n_layers": 3, "n_heads": 4},
    },
    translated: {
        "t5": T5,
        "bart": {},
        "pegasus": {},
        "marian": {},
        "led": {"attention_window": 16},
        "longt5": {**T5, "local_radius": 15},
        "switch_transformers": {**T5, "num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    },
    images: {
        "vit": VIT,
        "beit": VIT,
        "dinov2": VIT,
        "swin": WINDOWS,
        "swinv2": WINDOWS,
        "convnextv2": {**STAGES, "num_stages": 3},
        "resnet": {**STAGES, "embedding_size": 16, "layer_type": "basic"},
        "mobilenet_v2": {"depth_multiplier": 0.35},
        "mobilevit": {"image_size": 64, "hidden_sizes": [24, 32, 40], "neck_hidden_sizes": [8, 8, 16, 24, 32, 40, 64]},
        "segformer": {
            **STAGES,
            "num_encoder_blocks": 3,
            "num_attention_heads": [1, 2, 4],
            "sr_ratios": [4, 2, 1],
            "patch_sizes": [7, 3, 3],
            "strides": [4, 2, 2],
            "mlp_ratios": [2, 2, 2],
            "decoder_hidden_size": 32,
        },
        "poolformer": {"hidden_sizes": [16, 32, 64, 64], "depths": [1, 1, 1, 1]},
        "pvt_v2": {
            "hidden_sizes": [16, 32, 64, 64],
            "depths": [1, 1, 1, 1],
            "image_size": 64,
            "num_attention_heads": [1, 2, 4, 4],
        },
        "focalnet": {
            "image_size": 64,
            "embed_dim": 24,
            "depths": [2, 2],
            "hidden_sizes": [24, 48],
            "focal_levels": [2, 2],
            "focal_windows": [3, 3],
        },
    },
    sounds: {"wav2vec2": {}, "hubert": {}, "wavlm": {}, "data2vec-audio": {"conv_pos_kernel_size": 3}},
}


def clip() -> Made:
    """Images and texts of one meaning."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}
    of_text, of_images = {**sizes, "vocab_size": WORDS, "eos_token_id": 2}, {**sizes, "image_size": 64, "patch_size": 8}
    given = {"input_ids": words(), "pixel_values": torch.randn(TEXTS, 3, 64, 64)}
    found = network("clip", "", {"text_config": of_text, "vision_config": of_images, "projection_dim": 64})
    return found, given, None


def whisper() -> Made:
    """Words of a spectrogram."""
    sizes = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4}
    sizes |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "num_mel_bins": 40}
    sizes |= {"vocab_size": WORDS, "max_source_positions": 100, "max_target_positions": 64, "decoder_start_token_id": 1}
    found = network("whisper", "ForSpeechSeq2Seq", sizes | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2})
    return found, {"input_features": torch.randn(8, 40, 200), "labels": words(32)}, None


def spectrogram() -> Made:
    """Labels of sounds."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}
    found = network(
        "audio-spectrogram-transformer",
        "ForAudioClassification",
        sizes | {"max_length": 128, "num_mel_bins": 32, "num_labels": 10},
    )
    return found, {"input_values": torch.randn(8, 128, 32)}, torch.randint(0, 10, (8,))


def videos(kind: str, **sizes: Any) -> Made:
    """Labels of videos of eight frames."""
    small = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}
    found = network(
        kind,
        "ForVideoClassification",
        small | {"image_size": 32, "patch_size": 8, "num_frames": 8, "num_labels": 10} | sizes,
    )
    return found, {"pixel_values": torch.randn(4, 8, 3, 32, 32)}, torch.randint(0, 10, (4,))


def series(kind: str) -> Made:
    """Forecasts of one series from its past."""
    import transformers

    sizes = {
        "prediction_length": 8,
        "context_length": 32,
        "lags_sequence": [1, 2],
        "num_time_features": 2,
        "d_model": 32,
    }
    sizes |= {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "input_size": 1}
    config = transformers.AutoConfig.for_model(kind, **sizes, encoder_layerdrop=0.0, decoder_layerdrop=0.0)
    name = type(config).__name__.removesuffix("Config")
    n, past = 32, 34
    given = {"past_values": torch.randn(n, past), "past_time_features": torch.randn(n, past, 2)}
    given |= {"past_observed_mask": torch.ones(n, past), "future_values": torch.randn(n, 8)}
    given |= {"future_time_features": torch.randn(n, 8, 2)}
    return getattr(transformers, f"{name}ForPrediction")(config), given, None


def mixed_patches() -> Made:
    """PatchTSMixer."""
    import transformers

    config = transformers.PatchTSMixerConfig(
        num_input_channels=4, context_length=128, prediction_length=8, patch_length=8, patch_stride=8, d_model=32
    )
    given = {"past_values": torch.randn(32, 128, 4), "future_values": torch.randn(32, 8, 4)}
    return transformers.PatchTSMixerForPrediction(config), given, None


def patches() -> Made:
    """PatchTST."""
    import transformers

    config = transformers.PatchTSTConfig(
        num_input_channels=4,
        context_length=128,
        patch_length=8,
        patch_stride=8,
        d_model=32,
        num_attention_heads=4,
        ffn_dim=64,
        prediction_length=16,
    )
    given = {"past_values": torch.randn(16, 128, 4), "future_values": torch.randn(16, 16, 4)}
    return transformers.PatchTSTForPrediction(config), given, None


def decisions() -> Made:
    """Actions of a decision transformer."""
    import transformers

    config = transformers.DecisionTransformerConfig(
        state_dim=8, act_dim=4, hidden_size=64, n_layer=3, n_head=4, max_ep_len=64
    )
    n, length = 16, 32
    given = {
        "states": torch.randn(n, length, 8),
        "actions": torch.randn(n, length, 4),
        "rewards": torch.randn(n, length, 1),
    }
    given |= {"returns_to_go": torch.randn(n, length, 1), "timesteps": torch.arange(length).repeat(n, 1)}
    given |= {"attention_mask": torch.ones(n, length)}
    return transformers.DecisionTransformerModel(config), given, None


OTHERS = {
    **{
        "clip": clip,
        "whisper": whisper,
        "audio-spectrogram-transformer": spectrogram,
        "decision_transformer": decisions,
    },
    **{
        "videomae": lambda: videos("videomae", tubelet_size=2),
        "vivit": lambda: videos("vivit", tubelet_size=[2, 8, 8]),
    },
    **{"timesformer": lambda: videos("timesformer"), "patchtst": patches, "patchtsmixer": mixed_patches},
    **{kind: lambda kind=kind: series(kind) for kind in ("time_series_transformer", "informer")},
}
CASES = {
    f"transformers: {kind}": Case("transformers", lambda make=make, kind=kind, sizes=sizes: make(kind, dict(sizes)))
    for make, kinds in KINDS.items()
    for kind, sizes in kinds.items()
} | {f"transformers: {kind}": Case("transformers", make) for kind, make in OTHERS.items()}
