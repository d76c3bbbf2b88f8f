"""Attention of every anchor to all anchors, in torch's fused kernels, without parameters.

    out = softmax(q k^T D^-0.5) values

One head, and nothing is masked: an anchor meets itself too. Places along the genome are not read, for v has what is
known of them. Scores [N, N] exist for some rows and columns at a time: a device without such a kernel is refused.

Legend: N anchors, D dim.
"""

import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_amp._torch import attend_on_cpu
from lightning_amp.errors import ModelError
from lightning_amp.shapes import PerAnchor
from lightning_amp.techniques.hic.attention.sizes import check_rows

KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
"""All but the one that makes the scores."""


class FullAttention(nn.Module):
    """Attention to all anchors at once; see `LocalAttention` for that to neighbours."""

    reach = "full"

    def forward(self, q: PerAnchor, k: PerAnchor, values: PerAnchor) -> PerAnchor:
        """Attention of all rows to all rows.

        Raises:
            ModelError: Not as many keys and values as queries, or torch has no kernel for these.
        """
        check_rows(q, k, values)
        # the kernels read a row's channels side by side
        q, k, values = (
            x[None, None] if x.stride(-1) == 1 else x.contiguous()[None, None] for x in (q, k, values)
        )
        if q.device.type == "meta":
            # without values torch would choose the form with scores
            return attend_on_cpu(q, k, values)[0][0, 0]  # type: ignore[no-any-return]
        try:
            with sdpa_kernel(KERNELS):
                return F.scaled_dot_product_attention(q, k, values)[0, 0]
        except RuntimeError as error:
            if "No available kernel" not in str(error):
                raise
            raise ModelError(
                f"full attention was called with {q.shape[-1]!r} channels of {q.dtype!r} on {q.device.type!r}, for"
                " which torch has no fused kernel, and its other form makes all scores; use float32 or bfloat16 and a"
                " dim that is a multiple of 8, or key='attention', which is local"
            ) from error
