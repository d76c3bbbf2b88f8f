"""Install chunked (S3), fused or sdpa attention in the place of a decoder's local attention."""

from typing import Any

from torch import nn

from lightning_amp.techniques.hic.attention.fused import fuse_attention
from lightning_amp.techniques.hic.attention.rows import ChunkedAttention, FusedAttention, SdpaAttention
from lightning_amp.techniques.hic.attention.s3_chunked import chunk_attention


def chunked(module: nn.Module, spec: ChunkedAttention, mesh: Any) -> nn.Module:
    """S3: a few buckets at a time."""
    return chunk_attention(module, buckets=spec.buckets, retain=spec.retain)


def fused(module: nn.Module, spec: FusedAttention, mesh: Any) -> nn.Module:
    """Scores of a few queries at a time, and a backward pass by hand."""
    return fuse_attention(module, keep=spec.keep)


def sdpa(module: nn.Module, spec: SdpaAttention, mesh: Any) -> nn.Module:
    """torch's fused kernels."""
    return fuse_attention(module, kernel="sdpa")
