"""What CLIP's last block may attend by, so that patches stay where they are: variants for dense features.

All are read-outs without training: queries, keys and values are those of the last block, only the
attention map is another one.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from regista.tokens import TokenLayout

LastBlock = Literal["vanilla", "maskclip", "sclip", "naclip", "clearclip"]
# Whether the block's residual connection and its MLP stay.
KEEPS_RESIDUAL = {"vanilla": True, "maskclip": False, "sclip": True, "naclip": False, "clearclip": False}
NACLIP_STD = 5.0


def last_block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: TokenLayout,
    variant: LastBlock,
    *,
    std: float = NACLIP_STD,
) -> Tensor:
    """What each token gathers in the last block: (B, H, N, K) three times -> (B, H, N, K).

    Args:
        q, k, v: Unscaled, as used in the product.
        layout: Of the N tokens.
        variant: "vanilla" softmax(q k'); "maskclip" (2112.01071) the token's own value; "sclip"
            (2312.01597) softmax(q q') + softmax(k k'), whose rows sum to 2; "naclip" (2404.08181)
            softmax(k k' + a Gaussian of the distance between patches); "clearclip" (2407.12442)
            softmax(q q').
        std: Of NACLIP's Gaussian, in patches.

    Raises:
        ValueError: for another variant.
    """
    if variant not in get_args(LastBlock):
        raise ValueError(f"the last block is one of {', '.join(get_args(LastBlock))}, got {variant!r}")
    if variant == "maskclip":
        return v
    attend = torch.nn.functional.scaled_dot_product_attention
    if variant == "vanilla":
        return attend(q, k, v)
    if variant == "clearclip":
        return attend(q, q, v)
    if variant == "sclip":
        return attend(q, q, v) + attend(k, k, v)
    near = neighbourhood(layout, std).to(device=q.device, dtype=q.dtype)  # (N, N)
    return attend(k, k, v, near)


def neighbourhood(layout: TokenLayout, std: float = NACLIP_STD) -> Tensor:
    """NACLIP's bias: exp(-distance^2 / (2 std^2)) between patches, 0 for all other tokens, (N, N) float32.

    The distance is that of the cells of the grid; on the diagonal it is 1.

    Raises:
        ValueError: if ``std`` is not positive.
    """
    if not std > 0:
        raise ValueError(f"std is positive, in patches, got {std}")
    cells = torch.cartesian_prod(*(torch.arange(float(cells)) for cells in layout.grid_size))  # (P, 2)
    between = torch.exp(-torch.cdist(cells, cells).square() / (2 * std**2))  # (P, P)
    rows = {name: torch.zeros(part.shape[-2], layout.num_patches) for name, part in _empty(layout).items()}
    tall = layout.join({**rows, "patches": between})  # (N, P)
    columns = {name: torch.zeros(layout.num_tokens, part.shape[-2]) for name, part in _empty(layout).items()}
    return layout.join({**columns, "patches": tall}, dim=-1)


def _empty(layout: TokenLayout) -> dict[str, Tensor]:
    return layout.split(torch.zeros(layout.num_tokens, 1))
