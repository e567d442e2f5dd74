"""A small module with the names, order of operations and position resizing of a torch.hub DINOv2.

Written from its description; the hub's own code is in no package. ``attention`` picks the way the
product is computed (softmax by hand, torch's fused function, or a kernel that takes (B, N, H, K)
and that nothing can look into); ``resize`` the generation of the position resizing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

RESIZES = ("offset", "size", "antialiased size", "factor", "factor without check")


class LayerScale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class PatchEmbed(nn.Module):
    def __init__(self, side: int, patch: int, width: int) -> None:
        super().__init__()
        self.img_size, self.patch_size = (side, side), (patch, patch)
        self.num_patches = (side // patch) ** 2
        self.proj = nn.Conv2d(3, width, patch, patch)
        self.norm = nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        assert all(side % patch == 0 for side, patch in zip(images.shape[-2:], self.patch_size, strict=True))
        return self.norm(self.proj(images).flatten(2).transpose(1, 2))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, drop: Any) -> None:
        super().__init__()
        self.num_heads = heads
        self.scale = (width // heads) ** -0.5
        self.qkv = nn.Linear(width, 3 * width)
        self.attn_drop = drop
        self.proj = nn.Linear(width, width)
        self.proj_drop = nn.Dropout(0.0)

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(x).chunk(3, -1)
        return tuple(part.unflatten(-1, (self.num_heads, -1)) for part in (q, k, v))  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.transpose(1, 2) for part in self.parts(x))  # (B, H, N, K)
        probabilities = self.attn_drop((q * self.scale @ k.mT).softmax(-1))
        return self.proj_drop(self.proj((probabilities @ v).transpose(1, 2).flatten(2)))


class FusedAttention(Attention):
    def forward(self, x: Tensor, is_causal: bool = False) -> Tensor:
        q, k, v = (part.transpose(1, 2) for part in self.parts(x))
        rate = self.attn_drop if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=is_causal)
        return self.proj_drop(self.proj(out.transpose(1, 2).flatten(2)))


class MemEffAttention(Attention):
    """As with xformers installed: no function of torch sees the product."""

    def forward(self, x: Tensor, attn_bias: Any = None) -> Tensor:
        assert attn_bias is None
        q, k, v = self.parts(x)  # (B, N, H, K)
        logits = torch.einsum("bqhk,bnhk->bhqn", q, k) * self.scale
        out = torch.einsum("bhqn,bnhk->bqhk", logits.softmax(-1), v)
        return self.proj_drop(self.proj(out.flatten(2)))


ATTENTIONS: dict[str, type[Attention]] = {"by hand": Attention, "fused": FusedAttention, "xformers": MemEffAttention}


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, width)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.fc2(self.drop(self.act(self.fc1(x)))))


class SwiGLUFFN(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        hidden = (int(hidden * 2 / 3) + 7) // 8 * 8
        self.w12 = nn.Linear(width, 2 * hidden)
        self.w3 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.w12(x).chunk(2, -1)
        return self.w3(F.silu(gate) * value)


class SwiGLUFFNFused(SwiGLUFFN):
    """As with xformers installed: weights go to one kernel, and the layers are never called."""

    def forward(self, x: Tensor) -> Tensor:
        gate, value = F.linear(x, self.w12.weight, self.w12.bias).chunk(2, -1)
        return F.linear(F.silu(gate) * value, self.w3.weight, self.w3.bias)


SwiGLUFFNFused.__module__ = "xformers.ops.swiglu_op"
MLPS: dict[str, Any] = {"mlp": Mlp, "swiglu": SwiGLUFFN, "xformers": SwiGLUFFNFused, "identity": nn.Identity}


class Block(nn.Module):
    def __init__(self, width: int, heads: int, attention: str, mlp: str) -> None:
        super().__init__()
        drop = 0.0 if attention == "fused" else nn.Dropout(0.0)
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attn = ATTENTIONS[attention](width, heads, drop)
        self.ls1 = LayerScale(width)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = MLPS[mlp](width, 2 * width)
        self.ls2 = LayerScale(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))


class BlockChunk(nn.ModuleList):
    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = block(x)
        return x


class DinoVisionTransformer(nn.Module):
    def __init__(
        self,
        *,
        side: int = 56,
        patch: int = 14,
        width: int = 48,
        depth: int = 2,
        heads: int = 3,
        registers: int = 0,
        attention: str = "by hand",
        mlp: str = "mlp",
        chunks: int = 0,
        resize: str = "offset",
    ) -> None:
        super().__init__()
        self.embed_dim, self.n_blocks, self.num_heads, self.patch_size = width, depth, heads, patch
        self.num_register_tokens = registers
        self.resize = resize
        self.patch_embed = PatchEmbed(side, patch, width)
        self.cls_token = nn.Parameter(torch.randn(1, 1, width))
        self.pos_embed = nn.Parameter(0.2 * torch.randn(1, 1 + self.patch_embed.num_patches, width))
        self.register_tokens = nn.Parameter(torch.randn(1, registers, width)) if registers else None
        blocks: list[nn.Module] = [Block(width, heads, attention, mlp) for _ in range(depth)]
        if chunks:
            each = depth // chunks
            padded = [[nn.Identity()] * start + blocks[start : start + each] for start in range(0, depth, each)]
            self.blocks = nn.ModuleList([BlockChunk(chunk) for chunk in padded])
        else:
            self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Identity()
        self.mask_token = nn.Parameter(torch.zeros(1, width))

    def interpolate_pos_encoding(self, x: Tensor, w: int, h: int) -> Tensor:
        """Called with height and width, in this order."""
        stored = self.pos_embed.shape[1] - 1
        if x.shape[1] - 1 == stored and w == h:
            return self.pos_embed
        side, rows, cols = int(stored**0.5), w // self.patch_size, h // self.patch_size
        table = self.pos_embed.float()
        grid = table[:, 1:].reshape(1, side, side, -1).permute(0, 3, 1, 2)
        if "size" in self.resize:
            grid = F.interpolate(grid, (rows, cols), mode="bicubic", antialias=self.resize == "antialiased size")
        else:
            offset = 0.1 if self.resize == "offset" else 0.0
            factors = ((rows + offset) / side, (cols + offset) / side)
            grid = F.interpolate(grid, scale_factor=factors, mode="bicubic")
        if self.resize != "factor without check":
            assert grid.shape[-2:] == (rows, cols)
        return torch.cat([table[:, :1], grid.flatten(2).mT], 1).to(x.dtype)

    def prepare_tokens_with_masks(self, x: Tensor, masks: Tensor | None = None) -> Tensor:
        height, width = x.shape[-2:]
        x = self.patch_embed(x)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1)
        x = x + self.interpolate_pos_encoding(x, height, width)
        if self.register_tokens is not None:
            x = torch.cat([x[:, :1], self.register_tokens.expand(len(x), -1, -1), x[:, 1:]], 1)
        return x

    def forward_features(self, x: Tensor, masks: Tensor | None = None) -> dict[str, Any]:
        x = self.prepare_tokens_with_masks(x, masks)
        for block in self.blocks:
            x = block(x)
        normed = self.norm(x)
        first_patch = 1 + self.num_register_tokens
        return {
            "x_norm_clstoken": normed[:, 0],
            "x_norm_regtokens": normed[:, 1:first_patch],
            "x_norm_patchtokens": normed[:, first_patch:],
            "x_prenorm": x,
            "masks": masks,
        }

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.forward_features(x)["x_norm_clstoken"])
