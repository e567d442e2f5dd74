"""From transformers and torch.hub to timm: the same tokens out of a model that ``timm.create_model`` builds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from regista.backbones.base import Backbone
from regista.backbones.model_record import keep_planted
from regista.backbones.plain_weights import ADVICE, check_plain_weights
from regista.backbones.positions import DINOV2_HUB, TIMM, PositionResize
from regista.backbones.timm import TimmBackbone
from regista.backbones.timm_files import backbone_from_file
from regista.backbones.timm_format import mlp_ratio_for
from regista.tokens import square_grid

# Architectures of timm whose defaults are what no argument of plain text can say: {(gated, layer scale, eps): name}.
TABLE_ARCHITECTURES = {
    (False, True, 1e-6): "vit_small_patch14_reg4_dinov2",
    (False, False, 1e-6): "vit_small_patch16_224",
    (True, True, 1e-6): "vit_giant_patch14_reg4_dinov2",
    (False, True, 1e-5): "vit_base_patch16_clip_224",
    (False, False, 1e-5): "vit_base_patch16_clip_224",
}
ROPE_ARCHITECTURES = {False: "vit_small_patch16_dinov3", True: "vit_small_plus_patch16_dinov3"}
ROPE_EPS = 1e-5
SMALLEST_EPS = 1e-6
FAMILIES = {"Dinov2Model", "Dinov2WithRegistersModel", "ViTModel", "DINOv3ViTModel"}
_GATED = re.compile(r"\.mlp\.(gate_proj|weights_in|w12|w1)\.weight$")
_LAYER_SCALE = re.compile(r"\.(lambda1|gamma)$")
_QUERY_BIAS = re.compile(r"\.(q_proj|query|qkv|v_proj|value)\.bias$")


def as_timm_backbone(backbone: Backbone) -> TimmBackbone:
    """A live timm model with the same tokens, in float32, with CLS, the registers and the patches in their places.

    transformers' Dinov2, Dinov2WithRegisters and ViT, and torch.hub's DINOv2, become a
    ``VisionTransformer`` (with registers in the convention of timm's own: CLS has its position folded in),
    DINOv3ViT becomes an ``Eva``. Heads and poolers are left out.

    Returns:
        A new backbone that shares nothing with the old one, or the same one if it is of timm already. Its ``positions``
        are those of the source, so that other image sizes give the same tokens as well.

    Raises:
        ValueError: for other models, an activation, norm or bias that timm has no architecture for, and backbones
            that are more than their weights.
    """
    check_plain_weights(backbone, "a model of timm")
    if isinstance(backbone, TimmBackbone):
        return backbone
    vit: Any = backbone.module
    if type(vit).__name__ not in FAMILIES and backbone.library != "dinov2_hub":
        known = ", ".join(sorted(FAMILIES))
        raise ValueError(
            f"{backbone.name} is a {type(vit).__name__} of {backbone.library or 'no known library'}; only {known} and "
            "torch.hub's DINOv2 can become a model of timm"
        )
    state = {key: value.detach().float().cpu().clone() for key, value in vit.state_dict().items()}
    state = {key: value for key, value in state.items() if not key.startswith("pooler.")}
    architecture, arguments, notes = _architecture(backbone, state)
    positions = _positions(backbone)
    result = backbone_from_file(
        partial(_created, architecture, arguments),
        state,
        name=backbone.name,
        source=backbone.name,
        image_size=backbone.image_size,
        positions=positions,
    )
    result.mean, result.std = backbone.mean, backbone.std
    result.notes = [*backbone.notes, *result.notes, *notes]
    if getattr(backbone, "full_model", vit) is not vit:
        result.notes.append(f"only the {type(vit).__name__} inside is converted; the head is left out")
    result.notes += notes_on_other_sizes(result)
    keep_planted(backbone, result)
    return result


def notes_on_other_sizes(backbone: TimmBackbone) -> list[str]:
    """What bare timm does otherwise with this model, away from its native size; empty if nothing."""
    if backbone.vit.pos_embed is None or backbone.positions == TIMM:
        return []
    note = (
        "bare timm resizes the position table in its own way (bicubic with antialiasing), so at other sizes than the "
        "native one its tokens differ from the source's; regista.load heeds the source's way"
    )
    return [note]


def _created(architecture: str, arguments: Mapping[str, Any], **more: Any) -> nn.Module:
    import timm

    module: nn.Module = timm.create_model(architecture, pretrained=False, **{**arguments, **more})
    return module


def _architecture(backbone: Any, state: Mapping[str, Tensor]) -> tuple[str, dict[str, Any], list[str]]:
    """A name that timm knows, its arguments, and what to say about them."""
    gated = any(_GATED.search(key) for key in state)
    _check_activation(backbone, gated)
    biased = any(_QUERY_BIAS.search(key) for key in state)
    hidden = int(next(iter(backbone.block_sites())).mlp_out.in_features)
    rope = type(backbone.module).__name__ == "DINOv3ViTModel"
    shared: dict[str, Any] = {
        "img_size": _native_side(backbone),
        "patch_size": backbone.patch_size,
        "num_classes": 0,
        "global_pool": "token",
        "embed_dim": backbone.embed_dim,
        "depth": backbone.depth,
        "num_heads": backbone.num_heads,
    }
    scaled = any(_LAYER_SCALE.search(key) for key in state)
    if scaled:
        shared["init_values"] = 1e-5
    eps, notes = _eps(backbone, rope)
    if rope:
        config = backbone.module.config
        if not (config.proj_bias and config.mlp_bias):
            raise ValueError(f"{backbone.name} has projections without bias, and timm's Eva has none such; {ADVICE}")
        name = ROPE_ARCHITECTURES[gated] + ("_qkvb" if biased else "")
        shared |= {"num_reg_tokens": backbone.num_register_tokens, "rope_temperature": float(config.rope_theta)}
        shared |= {"mlp_ratio": mlp_ratio_for(hidden, backbone.embed_dim)}
        return name, shared | ({"swiglu_align_to": 1 if hidden % 8 else 8} if gated else {}), notes
    if (gated, scaled, eps) not in TABLE_ARCHITECTURES:
        raise ValueError(
            f"{backbone.name} has layer norms of eps {eps}, {'SwiGLU' if gated else 'GELU'} and "
            f"{'' if scaled else 'no '}layer scale, and timm no such architecture; {ADVICE}"
        )
    registers = backbone.num_register_tokens
    shared |= {"reg_tokens": registers, "no_embed_class": registers > 0, "qkv_bias": biased, "pre_norm": False}
    shared["mlp_ratio"] = mlp_ratio_for(2 * hidden if gated else hidden, backbone.embed_dim)
    return TABLE_ARCHITECTURES[gated, scaled, eps], shared, notes


def _check_activation(backbone: Any, gated: bool) -> None:
    if backbone.library != "transformers":
        return
    word = str(backbone.module.config.hidden_act)
    needed = "silu" if gated and type(backbone.module).__name__ == "DINOv3ViTModel" else "gelu"
    ignored = gated and needed == "gelu"  # the SwiGLU of DINOv2 takes SiLU whatever the configuration says
    if word != needed and not ignored:
        raise ValueError(f"{backbone.name} has the activation {word!r}, {needed!r} is what can be built; {ADVICE}")


def _eps(backbone: Any, rope: bool) -> tuple[float, list[str]]:
    """Of the layer norms, as timm can build it, and a note where it had to be changed."""
    found = {float(module.eps) for module in backbone.module.modules() if isinstance(module, nn.LayerNorm)}
    if len(found) != 1 or (rope and found != {ROPE_EPS}):
        wanted = f"{ROPE_EPS} everywhere" if rope else "one everywhere"
        raise ValueError(f"{backbone.name} has layer norms of eps {sorted(found)}, wanted {wanted}; {ADVICE}")
    [eps] = found
    if eps < SMALLEST_EPS:  # 1e-12 in transformers' ViT, of checkpoints that were trained with timm's and JAX's 1e-6
        return SMALLEST_EPS, [f"the eps of the layer norms, {eps:g}, became timm's {SMALLEST_EPS:g}"]
    return eps, []


def _native_side(backbone: Any) -> int:
    """What the position table is for, in pixels; transformers and the hub have square ones only."""
    if backbone.library == "transformers":
        size = backbone.module.config.image_size
        return int(size if isinstance(size, int) else max(size))
    rows, _ = square_grid(int(backbone.module.pos_embed.shape[1]) - 1)
    return rows * int(backbone.patch_size)


def _positions(backbone: Any) -> PositionResize | None:
    """A hub module's own settings, where its generation has them; else the convention of the names (None)."""
    vit = backbone.module
    if backbone.library != "dinov2_hub" or not hasattr(vit, "interpolate_antialias"):
        return None
    offset = float(getattr(vit, "interpolate_offset", DINOV2_HUB.offset) or 0.0)
    return PositionResize(antialias=bool(vit.interpolate_antialias), offset=offset)
