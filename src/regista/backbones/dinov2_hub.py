"""DINOv2 modules as ``torch.hub.load("facebookresearch/dinov2", ...)`` gives them.

Their code is in no package, so a module is known by the names of its parts. Three generations
of it are about: without registers, with them, and with ``scaled_dot_product_attention``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regista.backbones.additions import Addition
from regista.backbones.base import Backbone
from regista.backbones.capture import BlockSites
from regista.tokens import square_grid

CLASS_NAME = "DinoVisionTransformer"
PARTS = ("cls_token", "pos_embed", "patch_embed", "blocks", "norm", "forward_features", "interpolate_pos_encoding")
ATTENTION_PARTS = {"qkv", "proj", "attn_drop", "proj_drop"}


def is_dinov2_hub(module: nn.Module) -> bool:
    """Whether a module is a hub DINOv2, or a classifier that holds one as ``backbone``."""
    return _backbone(module) is not None


class Dinov2HubBackbone(Backbone):
    """Adapter of a live hub DINOv2: [CLS][registers][patches].

    Positions are resized by the module itself: without registers by a scale factor with offset
    0.1 and no antialiasing, with registers to a size with antialiasing.

    Args:
        module: A ``DinoVisionTransformer``, or a hub classifier around one.
        name: For messages and records.
        image_size: (height, width) for ``preprocess``; the model's native size by default.

    Attributes:
        full_model: What was given.

    Raises:
        ValueError: for other modules (DINOv3's of the same class name among them), non-square
            patches or grids, blocks of an unknown kind, and forks that take images with another
            number of channels or count registers they do not have.
    """

    library = "dinov2_hub"

    def __init__(self, module: nn.Module, *, name: str, image_size: tuple[int, int] | None = None) -> None:
        vit: Any = _backbone(module)
        if vit is None:
            raise ValueError(
                f"{name}: {type(module).__name__} is not a hub DINOv2 ({CLASS_NAME} with {', '.join(PARTS)}); "
                "DINOv3 comes through timm or transformers"
            )
        patch, native, registers = _checked_shapes(vit, name)
        blocks = _blocks(vit)
        _check_blocks(blocks, name)
        attention: Any = next(iter(blocks)).attn
        super().__init__(
            vit,
            name=name,
            embed_dim=int(vit.cls_token.shape[-1]),
            num_heads=int(attention.num_heads),
            patch_size=patch,
            image_size=image_size or native,
            num_register_tokens=registers,
        )
        self.vit = vit
        self.full_model = module
        self._good_sizes = {native}

    def block_sites(self) -> Sequence[BlockSites]:
        """The blocks, chunked or not, ``attn``, and ``mlp.fc2`` or ``mlp.w3``."""
        return [BlockSites(block, block.attn, _last_linear(block.mlp)) for block in _blocks(self.vit)]

    def patch_projection(self) -> nn.Module | None:
        """The convolution of the patch embedding."""
        projection: nn.Module = self.vit.patch_embed.proj
        return projection

    def position_table(self) -> nn.Parameter | None:
        """``pos_embed``, CLS row first."""
        table: nn.Parameter = self.vit.pos_embed
        return table

    def register_table(self) -> nn.Parameter | None:
        """``register_tokens``."""
        table: nn.Parameter | None = getattr(self.vit, "register_tokens", None)
        return table

    @torch.no_grad()
    def insert_registers(self, registers: Tensor) -> None:
        """Into ``register_tokens``; how positions are resized stays as it is.

        Raises:
            ValueError: for the first generation of the code, which has no registers.
        """
        if not hasattr(self.vit, "register_tokens"):
            raise ValueError(
                f"{self.name}: this copy of the hub's code knows no registers; take a newer one, or the same weights "
                "through timm"
            )
        old = registers.new_zeros(1, 0, self.embed_dim) if self.register_table() is None else self.vit.register_tokens
        self.vit.register_tokens = nn.Parameter(torch.cat([old, registers.unsqueeze(0)], 1))
        self.vit.num_register_tokens = int(self.vit.register_tokens.shape[1])

    def add(self, addition: Addition) -> None:
        """As in ``Backbone``; fused MLPs call their last layer from now on, as hooks hang there."""
        for block in _blocks(self.vit):
            if _is_fused(block.mlp):
                vars(block.mlp).setdefault("forward", partial(_gated_mlp, block.mlp))
        super().add(addition)

    def forward_tokens(self, images: Tensor) -> Tensor:
        """``forward_features``, its parts put together again: (B, 3, H, W) -> (B, N, D)."""
        found = self.vit.forward_features(images)
        parts = {"cls": found["x_norm_clstoken"].unsqueeze(1), "patches": found["x_norm_patchtokens"]}
        if self.num_register_tokens:
            parts["registers"] = found["x_norm_regtokens"]
        return self.layout((images.shape[-2], images.shape[-1])).join(parts)

    @contextmanager
    def prepared(self, image_size: tuple[int, int]) -> Iterator[None]:
        """Check that the positions come out right, and let fused MLPs call their last layer."""
        self._check_positions(image_size)
        with ExitStack() as stack:
            for block in _blocks(self.vit):
                if _is_fused(block.mlp):
                    stack.enter_context(_own_forward(block.mlp, partial(_gated_mlp, block.mlp)))
            yield

    @contextmanager
    def fused_attention(self) -> Iterator[None]:
        """Compute attention by ``scaled_dot_product_attention`` out of ``qkv`` and ``proj``; undone on exit."""
        with ExitStack() as stack:
            for sites in self.block_sites():
                stack.enter_context(_own_forward(sites.attn, partial(_attend, sites.attn)))
            yield

    def attention_backend(self) -> str:
        """The class of the first block's attention."""
        sites, *_ = self.block_sites()
        return type(sites.attn).__name__

    def _check_positions(self, image_size: tuple[int, int]) -> None:
        if image_size in self._good_sizes:
            return
        layout = self.layout(image_size)
        tokens = self.vit.cls_token.detach().expand(1, layout.num_patches + 1, -1)
        got: int | None = None
        try:
            with torch.no_grad():
                got = self.vit.interpolate_pos_encoding(tokens, *image_size).shape[1] - 1
        except AssertionError:  # the module's own check, which has no message
            pass
        if got != layout.num_patches:
            rows, cols = layout.grid_size
            raise ValueError(
                f"{self.name}: the module cannot resize its positions to {rows}x{cols} cells ({layout.num_patches}, "
                f"got {got or 'an assertion'}), as its scale factor is rounded down; "
                f"take a size one patch ({self.patch_size} px) larger or smaller, or the same weights through timm"
            )
        self._good_sizes.add(image_size)


def _backbone(module: nn.Module) -> Any:
    for candidate in (module, getattr(module, "backbone", None)):
        names = {kind.__name__ for kind in type(candidate).__mro__}
        if CLASS_NAME in names and all(hasattr(candidate, part) for part in PARTS):
            return candidate
    return None


def _checked_shapes(vit: Any, name: str) -> tuple[int, tuple[int, int], int]:
    """Patch size, native (height, width), registers."""
    projection = vit.patch_embed.proj
    rows, cols = square_grid(vit.pos_embed.shape[1] - 1)
    height, width = projection.kernel_size
    size = (rows * height, cols * width)
    if height != width or tuple(getattr(vit.patch_embed, "img_size", size)) != size:
        raise ValueError(
            f"{name}: patches of {height}x{width} px over {vit.patch_embed.img_size} px; "
            "the hub's code places positions on square grids of square patches only"
        )
    if projection.in_channels != 3 or getattr(vit, "channel_adaptive", False):
        raise ValueError(f"{name}: takes images of {projection.in_channels} channels one by one, wanted RGB")
    table = getattr(vit, "register_tokens", None)
    registers = 0 if table is None else int(table.shape[1])
    counted = int(getattr(vit, "num_register_tokens", 0) or 0)
    if counted != registers:
        raise ValueError(
            f"{name}: cuts off {counted} registers but has {registers}, so its patch tokens are shifted; "
            "load the weights into the original module"
        )
    return int(height), size, registers


def _blocks(vit: Any) -> list[Any]:
    """The blocks in order, out of chunks that are padded with identities."""
    blocks: list[Any] = []
    for item in vit.blocks:
        blocks += item if isinstance(item, nn.ModuleList) else [item]
    return [block for block in blocks if not isinstance(block, nn.Identity)]


def _check_blocks(blocks: Sequence[Any], name: str) -> None:
    for index, block in enumerate(blocks):
        attention, mlp = getattr(block, "attn", None), getattr(block, "mlp", None)
        parts = {child for child, _ in attention.named_children()} if isinstance(attention, nn.Module) else set()
        if not {"qkv", "proj"} <= parts <= ATTENTION_PARTS or _last_linear(mlp) is None:
            raise ValueError(
                f"{name}: block {index} has attention {type(attention).__name__} of {sorted(parts)} and MLP "
                f"{type(mlp).__name__}; only qkv/proj attention and fc1/fc2 or w12/w3 MLPs can be looked into"
            )


def _last_linear(mlp: Any) -> Any:
    return getattr(mlp, "fc2", None) or getattr(mlp, "w3", None)


def _is_fused(mlp: nn.Module) -> bool:
    """The SwiGLU of xformers hands its weights to one kernel; its layers are never called."""
    return any(kind.__module__.partition(".")[0] == "xformers" for kind in type(mlp).__mro__)


@contextmanager
def _own_forward(module: nn.Module, forward: Callable[..., Tensor]) -> Iterator[None]:
    """Give one module another forward; left alone if somebody else already did."""
    if "forward" in vars(module):
        yield
        return
    vars(module)["forward"] = forward
    try:
        yield
    finally:
        del vars(module)["forward"]


def _attend(attention: Any, x: Tensor, *options: Any, **named: Any) -> Tensor:
    """What every generation of the hub's attention computes: (B, N, D) -> (B, N, D)."""
    if any(value is not None and value is not False for value in (*options, *named.values())):
        raise ValueError("attention with a bias, a causal mask or a map as its result cannot be captured")
    qkv = torch.unflatten(attention.qkv(x), -1, (3, attention.num_heads, -1))  # (B, N, 3, H, K)
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # (B, H, N, K)
    drop: Any = getattr(attention, "attn_drop", 0.0)  # a module, or in the newest generation a number
    rate = float(getattr(drop, "p", drop)) if attention.training else 0.0
    out = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, scale=getattr(attention, "scale", None))
    projected: Tensor = attention.proj(out.transpose(1, 2).flatten(2))  # (B, N, D)
    return attention.proj_drop(projected) if hasattr(attention, "proj_drop") else projected


def _gated_mlp(mlp: Any, x: Tensor) -> Tensor:
    """SwiGLU by its layers: (B, N, D) -> (B, N, D)."""
    if getattr(mlp, "w12", None) is None:
        gate, value = mlp.w1(x), mlp.w2(x)
    else:
        gate, value = mlp.w12(x).chunk(2, -1)
    out: Tensor = mlp.w3(F.silu(gate) * value)
    return out
