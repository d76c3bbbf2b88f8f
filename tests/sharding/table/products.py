"""Products, attention, Fourier transforms."""

import torch
import torch.nn.functional as F

from tests.sharding.table.case import case

X = (2, 9, 6)
HEADS = (2, 3, 9, 4)
FEW = (2, 3, 5, 4)
IMAGE = (2, 4, 12, 9)
LINE = (2, 4, 13)
VOLUME = (1, 2, 9, 5, 6)
SIX = (2, 6, 9, 4)
sdpa = F.scaled_dot_product_attention

PRODUCTS = [
    # --- products ---
    case("bilinear", F.bilinear, (9, 4), (9, 3), (2, 4, 3), (2,), at={0: 0, 1: 0}),
    case("scores", lambda q, k: q @ k.transpose(1, 2), X, (2, 7, 6), at={0: 1, 1: 1}),
    case("baddbmm with factors", lambda c, a, b: torch.baddbmm(c, a, b, beta=0.5, alpha=2), (2, 9, 4), X, (2, 6, 4), at={0: 1, 1: 1}),
    case("baddbmm without a factor", lambda a, b: torch.baddbmm(torch.full((2, 9, 4), torch.nan).double(), a, b, beta=0), X, (2, 6, 4)),
    case("linear of a vector", lambda x, w, b: F.linear(x, w, b), X, (6,), (), at=2),
    case("linear of a split vector", lambda x, w: F.linear(x, w), X, (6,), at={1: 0}),
    case("addmm", lambda c, a, b: torch.addmm(c, a, b, beta=2), (4,), (9, 6), (6, 4), at={1: 0}),
    case("mv and dot", lambda a, x: (a @ x).dot(a @ x) + torch.dot(x, x), (9, 6), (6,), at=0),
    case("tensordot", lambda x, y: torch.tensordot(x, y, 1), X, (6, 5)),
    case("einsum over features", lambda x, w: torch.einsum("bnd,de->bne", x, w), X, (6, 4)),
    case("einsum over it", lambda x, y: torch.einsum("bnd, bne -> bde", x, y), X, (2, 9, 4), at={0: 1, 1: 1}),
    case("einsum of rows by rows", lambda x: torch.einsum("bnd,bmd->bnm", x, x), X),
    case("einsum with dots", lambda x, w: torch.einsum("...d,de->...e", x, w), X, (6, 4)),
    case("einsum with dots inside", lambda x, w: torch.einsum("b...d,...de->b...e", x, w), X, (9, 6, 4)),
    case("einsum without arrow", lambda x, w: torch.einsum("ij,jk", x, w), (9, 6), (6, 4), at=0),
    case("einsum with dots without arrow", lambda x, w: torch.einsum("...j,jk", x, w), X, (6, 4)),
    case("einsum of one", lambda x: torch.einsum("bnd->dbn", x) + torch.einsum("bnd->d", x)[:, None, None], X),
    case("einsum with a diagonal", lambda x: torch.einsum("bii->bi", x), (9, 3, 3), at=0),
    case("einsum of three", lambda a, b, c: torch.einsum("bnd,de,ne->bn", a, b, c), X, (6, 4), (9, 4)),
    case("cdist", torch.cdist, X, (2, 7, 6), at={0: 1, 1: 1}),
    case("cdist with a whole", lambda x, y: torch.cdist(x, y, p=1.0), X, (2, 7, 6)),
    case("cdist of features", torch.cdist, X, (2, 7, 6), at={0: 2}),
    case("features of neighbours", lambda x: _of_neighbours(x), (9, 3), at=0),
    case("within a radius", lambda x: (torch.cdist(x, x) < 1.5).to(x) @ x, X),
    case("cosine_similarity", lambda x, y: F.cosine_similarity(x, y, dim=-1) + F.cosine_similarity(x, y, 1).mean(), X, X),
    case("pairwise_distance", lambda x, y: F.pairwise_distance(x, y), X, X),
    case("normalize", lambda x: F.normalize(x, dim=-1) + F.normalize(x, dim=1), X),
    case("cross", lambda x, y: torch.cross(x, y, dim=-1) + torch.linalg.cross(x, y), (2, 9, 3), (2, 9, 3)),
    case("renorm", lambda x: torch.renorm(x, 2, 1, 1.0), X),
    case("solve for each by one matrix", lambda x, y: torch.linalg.solve(x @ x.mT + torch.eye(3).double(), y), (1, 4, 3, 3), (4, 4, 3, 2), at={1: 0}, refused="?"),
    case("inverse of each", lambda x: torch.linalg.inv(x @ x.mT + torch.eye(3).double()), (9, 3, 3), at=0),
    case("solve for each", lambda x, y: torch.linalg.solve(x @ x.mT + torch.eye(3).double(), y), (9, 3, 3), (9, 3, 2), at={0: 0, 1: 0}),
    case("determinant over it", lambda x: torch.linalg.det(x), (9, 9), at=0, refused="det"),
    case("svd of split rows", lambda x: torch.linalg.svd(x), (9, 3), at=0, refused="svd"),
    # --- attention ---
    case("causal attention", lambda q: sdpa(q, q * 2, q + 1, is_causal=True), HEADS, at=2),
    case("attention with a scale", lambda q: sdpa(q, q, q, scale=0.3), HEADS, at=2),
    case("attention with a mask", lambda q, m: sdpa(q, q, q + 1, attn_mask=m > 0), HEADS, (9, 9), at=2),
    case("attention of rows that see nothing", lambda q: sdpa(q, q, q, _blind()), HEADS, at=2),
    case("attention by hand in two types", lambda x: _by_hand(x), (4, 9, 6), at=0, tolerance=2e-2),
    case("attention of split heads to one head of keys", lambda q, k: sdpa(q, k, k + 1, is_causal=True), (2, 4, 9, 6), (2, 1, 9, 6)),
    case("attention of split samples to one of keys", lambda q, k: sdpa(q, k, k), (4, 3, 9, 6), (1, 3, 9, 6), at=0),
    case("attention of one sample to several of keys", lambda q, k: sdpa(q, k, k), (1, 3, 9, 6), (4, 3, 9, 6), at={0: 2, 1: 2}),
    case("attention of more dims to one of keys", lambda q, k: sdpa(q, k, k), (2, 3, 4, 9, 6), (1, 3, 4, 9, 6), at=3),
    case("attention with dropout of rows that see nothing", lambda q: sdpa(q, q, q, _blind(), 1e-13), HEADS, at=2),
    case("attention of rows that see nothing with split keys", lambda q, k: sdpa(q, k, k, _blind()), HEADS, HEADS, at={1: 2}),
    case("attention with a padding mask", lambda q, m: sdpa(q, q, q, m[:, None, None]), HEADS, _padding := (lambda: torch.arange(9) < torch.tensor([[9], [6]])), at={0: 2, 1: 1}),
    case("attention of grouped heads", lambda q, k: sdpa(q, k, k, enable_gqa=True), (2, 4, 9, 4), (2, 2, 9, 4), at={0: 2, 1: 2}),
    case("attention of six heads on several ranks", lambda q, k, v: sdpa(q, k, v), SIX, SIX, SIX, at={0: 2, 1: 2, 2: 2}),
    case("causal attention of six heads with a scale", lambda q: sdpa(q, q * 2, q + 1, is_causal=True, scale=0.3), SIX, at=2),
    case("cross-attention of six heads, more features of values", lambda q, k, v: sdpa(q, k, v), SIX, (2, 6, 7, 4), (2, 6, 7, 5), at={0: 2, 1: 2, 2: 2}),
    case("attention of six heads in groups", lambda q, k: sdpa(q, k, k + 1, enable_gqa=True), SIX, (2, 2, 9, 4), at={0: 2, 1: 2}),
    case("attention of six heads to one", lambda q, k: sdpa(q, k, k + 1, is_causal=True, enable_gqa=True), SIX, (2, 1, 9, 4), at={0: 2, 1: 2}),
    case("attention of six heads with a mask of each", lambda q: sdpa(q, q, q, _of_heads()), SIX, at=2),
    case("attention of scale 0", lambda x: sdpa(x, x, x, scale=0.0), X),
    case("attention that drops all", lambda x: sdpa(x, x, x, dropout_p=1.0), X),
    case("causal attention with a mask", lambda x: sdpa(x, x, x, torch.ones(9, 9).bool(), is_causal=True), X, refused="causal"),
    case("cross-attention of split keys, causal", lambda q, k: sdpa(q, k, k, is_causal=True), HEADS, HEADS, at={1: 2}),
    case("cross-attention of split keys with a mask", lambda q, k, m: sdpa(q, k, k, m > 0), FEW, HEADS, (5, 9), at={1: 2}),
    case("cross-attention of both, causal", lambda q, k: sdpa(q, k, k, is_causal=True), FEW, HEADS, at={0: 2, 1: 2}),
    case("attention with more features of values", lambda q, v: sdpa(q, q, v), HEADS, (2, 3, 9, 6), at={0: 2, 1: 2}),
    case("attention of five dims", lambda q, m: sdpa(q, q, q, m), (2, 1, 3, 9, 4), (2, 1, 1, 9, 9), at=3),
    case("attention without samples", lambda q: sdpa(q, q, q), (9, 4), at=0),
    case("attention with dropout", lambda q: sdpa(q, q, q, dropout_p=0.0, is_causal=True), HEADS, at=2),
    case("multi-head attention with weights", lambda x, w, b, o: _mha(x, x, w, b, o, need_weights=True), (9, 2, 6), (18, 6), (18,), (6, 6), at=0),
    case(
        "multi-head attention with masks",
        lambda x, w, b, o: _mha(
            x,
            x,
            w,
            b,
            o,
            attn_mask=torch.ones(9, 9).triu(1).bool(),
            key_padding_mask=_padding().logical_not(),
        ),
        (9, 2, 6),
        (18, 6),
        (18,),
        (6, 6),
        at=0,
    ),
    case("multi-head cross-attention", lambda x, m, w, b, o: _mha(x, m, w, b, o), (9, 2, 6), (5, 2, 6), (18, 6), (18,), (6, 6), at={0: 0, 1: 0}),
    # --- Fourier transforms ---
    case("rfft and irfft", lambda x: torch.fft.irfft(torch.fft.rfft(x, dim=1) * 2, n=9, dim=1), X),
    case("rfft with a length", lambda x: torch.view_as_real(torch.fft.rfft(x, n=7, dim=1, norm="ortho")), X),
    case("fft2", lambda x: torch.fft.fft2(x).abs(), X),
    case("rfft2 and irfft2", lambda x: torch.fft.irfft2(torch.fft.rfft2(x), s=(12, 9)), IMAGE, at=2),
    case("rfft2 of one image", lambda x: torch.fft.irfft2(torch.fft.rfft2(x), s=(12, 9)), (12, 9), at=0),
    case("rfft2 split at the last", lambda x: torch.fft.irfft2(torch.fft.rfft2(x), s=(12, 9)), (12, 9), at=1),
    case("rfftn", lambda x: torch.fft.irfftn(torch.fft.rfftn(x, dim=(2, 3, 4)), s=(9, 5, 6), dim=(2, 3, 4)), VOLUME, at=2),
    case("fftshift", lambda x: torch.fft.fftshift(x, dim=1) + torch.fft.ifftshift(x, dim=(1, 2)), X),
    case("hfft", lambda x: torch.fft.hfft(torch.fft.ihfft(x, dim=1), dim=1), X),
    case("spectral convolution", lambda x, w: _spectral(x, w), LINE, (4, 4, 3), at=2),
    case("stft", lambda x: torch.stft(x, 4, window=torch.ones(4).double(), return_complex=True).abs(), (2, 16), refused="stft"),
]  # fmt: skip


def _of_neighbours(x):
    places = torch.cdist(x, x).topk(3, largest=False).indices
    return (x[places] - x[:, None]).pow(2).sum(-1).amax(1)


def _by_hand(x):
    with torch.autocast("cpu", torch.bfloat16):
        q = F.linear(x.float(), torch.eye(6))
        return ((q @ q.mT).float().softmax(-1) @ q).double()


def _of_heads() -> torch.Tensor:
    """A mask with other scores for each head, and a row of one of them that sees nothing."""
    mask = torch.sin(torch.arange(6 * 9 * 9, dtype=torch.float64)).view(1, 6, 9, 9)
    return mask.index_put(
        (torch.tensor(0), torch.tensor(3), torch.tensor(5)), torch.tensor(-torch.inf, dtype=mask.dtype)
    )


def _blind():
    """A mask with rows that see nothing."""
    return torch.arange(9)[:, None] % 4 > 0


def _mha(x, memory, w, b, o, **masks):
    masks = {"need_weights": False, **masks}
    return F.multi_head_attention_forward(x, memory, memory, 6, 2, w, b, None, None, False, 0.0, o, None, **masks)


def _spectral(x, w):
    spectrum = torch.fft.rfft(x)
    low = torch.einsum("bim,iom->bom", spectrum[..., :3], w.to(spectrum.dtype))
    out = torch.zeros_like(spectrum)
    out[..., :3] = low
    return torch.fft.irfft(out, n=x.shape[-1])
