"""From timm and torch.hub to transformers: the same tokens out of its own model classes.

The names are those of ``key_maps``, read backwards. Sources: timm 1.0's ``VisionTransformer`` and
``Eva``, transformers' Dinov2, Dinov2WithRegisters and DINOv3ViT.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.models.dinov2.configuration_dinov2 import Dinov2Config
from transformers.models.dinov2.modeling_dinov2 import Dinov2Model
from transformers.models.dinov2_with_registers.configuration_dinov2_with_registers import Dinov2WithRegistersConfig
from transformers.models.dinov2_with_registers.modeling_dinov2_with_registers import Dinov2WithRegistersModel
from transformers.models.dinov3_vit.configuration_dinov3_vit import DINOv3ViTConfig
from transformers.models.dinov3_vit.modeling_dinov3_vit import DINOv3ViTModel

from regista.backbones.base import Backbone
from regista.backbones.key_maps import State, name_in_timm
from regista.backbones.meta_build import to_be_filled
from regista.backbones.model_record import keep_planted
from regista.backbones.plain_weights import ADVICE, PlainVit, check_plain_weights, plain_vit
from regista.backbones.positions import TIMM, TRANSFORMERS, PositionResize
from regista.backbones.transformers import TransformersBackbone
from regista.backbones.weights import load_strict

Family = Literal["auto", "dinov2", "dinov2_with_registers", "dinov3_vit"]
OF_FAMILY: dict[type[nn.Module], PositionResize] = {Dinov2Model: TRANSFORMERS, Dinov2WithRegistersModel: TIMM}
MAX_RATIO = 64
_ONLY_POOLED = re.compile(r"^(head|head_drop|attn_pool|fc_norm)\.")


def to_transformers(backbone: Backbone, *, family: Family = "auto") -> TransformersBackbone:
    """A live transformers model with the same tokens, in float32.

    A timm ``VisionTransformer`` becomes a ``Dinov2WithRegistersModel``, or a ``Dinov2Model`` if it has no
    registers and its position table is not resized in timm's way; timm's DINOv3 (``Eva``) becomes a ``DINOv3ViTModel``.
    A model without CLS but with registers gives its first register as CLS: the sequence stays the same, and
    what transformers calls CLS and ``pooler_output`` is a register. Heads are left out. The notes say all of this.

    Args:
        backbone: Of timm, or torch.hub's DINOv2. One of transformers is returned as it is.
        family: transformers' name of the wanted family ("auto" as above).

    Returns:
        A new backbone that shares nothing with the old one; the patches are the same ones, in the same order.

    Raises:
        ValueError: for what no such model can express (see ``plain_weights``; also MLPs whose width is not
            a whole multiple, rectangular position tables, and no token before the patches), and for
            backbones that are more than their weights.
    """
    check_plain_weights(backbone, "a model of transformers")
    if isinstance(backbone, TransformersBackbone):
        return backbone
    if backbone.library != "timm":
        from regista.backbones.timm_conversion import as_timm_backbone

        backbone = as_timm_backbone(backbone)
    facts = plain_vit(backbone)
    kind = _chosen(backbone, facts, family)
    vit: Any = backbone.module
    with_cls, registers = vit.cls_token is not None, backbone.num_register_tokens
    if not with_cls and not registers:
        raise ValueError(
            f"{backbone.name} has neither CLS nor registers, and {kind.__name__} always has a token before the "
            f"patches; {ADVICE}"
        )
    config = _config(backbone, facts, kind, registers if with_cls else registers - 1)
    state = _apart(vit, facts)
    _place_prefix(state, vit)
    with to_be_filled():
        module: Any = kind(config)
    report = load_strict(module, _in_names_of(module, state), name=backbone.name)
    result = TransformersBackbone(
        module.eval(), name=backbone.name, image_size=backbone.image_size, mean=backbone.mean, std=backbone.std
    )
    result.notes += [*backbone.notes, f"{backbone.name} as {kind.__name__}: {report}"]
    result.notes += _notes(backbone, kind, with_cls, facts)
    keep_planted(backbone, result)
    return result


def _chosen(backbone: Any, facts: PlainVit, family: Family) -> type[nn.Module]:
    """The model class for a family's name."""
    registers = backbone.num_register_tokens if backbone.vit.cls_token is not None else backbone.num_register_tokens - 1
    kinds: dict[str, type[nn.Module]] = {"dinov2": Dinov2Model, "dinov2_with_registers": Dinov2WithRegistersModel}
    kinds["dinov3_vit"] = DINOv3ViTModel
    fitting = "dinov3_vit" if facts.rope is not None else "dinov2_with_registers"
    if fitting != "dinov3_vit" and registers <= 0 and backbone.positions != TIMM:
        fitting = "dinov2"
    wanted = fitting if family == "auto" else family
    if wanted not in kinds:
        raise ValueError(f"family {family!r} is unknown; one of auto, {', '.join(kinds)}")
    if (wanted == "dinov3_vit") != (fitting == "dinov3_vit"):
        raise ValueError(f"{backbone.name} cannot be of family {wanted!r}, its positions are those of {fitting!r}")
    if wanted == "dinov2" and registers > 0:
        raise ValueError(f"{backbone.name} has {registers} registers, family 'dinov2' has none; take {fitting!r}")
    return kinds[wanted]


def _config(backbone: Backbone, facts: PlainVit, kind: type[nn.Module], registers: int) -> Any:
    rows, cols = facts.grid_size
    if rows != cols and facts.rope is None:
        raise ValueError(
            f"{backbone.name} has a position table of {rows}x{cols} cells, and transformers takes square ones only; "
            f"{ADVICE}"
        )
    shared: dict[str, Any] = {
        "hidden_size": backbone.embed_dim,
        "num_hidden_layers": backbone.depth,
        "num_attention_heads": backbone.num_heads,
        "layer_norm_eps": facts.eps,
        "image_size": max(rows, cols) * backbone.patch_size,
        "patch_size": backbone.patch_size,
    }
    if facts.rope is not None:
        return DINOv3ViTConfig(
            **shared,
            intermediate_size=facts.hidden,
            use_gated_mlp=facts.gated,
            hidden_act="silu" if facts.gated else "gelu",
            rope_theta=facts.rope,
            query_bias=facts.qkv_bias,
            key_bias=False,
            value_bias=facts.qkv_bias,
            num_register_tokens=registers,
        )
    ratio = _whole_ratio(backbone, facts)
    shared |= {"qkv_bias": facts.qkv_bias, "use_swiglu_ffn": facts.gated, "mlp_ratio": ratio, "hidden_act": "gelu"}
    if kind is Dinov2Model:
        return Dinov2Config(**shared)
    return Dinov2WithRegistersConfig(**shared, num_register_tokens=registers)


def _whole_ratio(backbone: Backbone, facts: PlainVit) -> int:
    """The whole number from which transformers computes the width of the MLP."""
    for ratio in range(1, MAX_RATIO):
        hidden = backbone.embed_dim * ratio
        if facts.hidden == ((int(hidden * 2 / 3) + 7) // 8 * 8 if facts.gated else hidden):
            return ratio
    wanted = "two thirds of a whole multiple, rounded up to 8" if facts.gated else "a whole multiple"
    raise ValueError(
        f"{backbone.name} has MLPs of {facts.hidden} units at width {backbone.embed_dim}, and transformers takes only "
        f"{wanted} of the width (mlp_ratio is an integer); {ADVICE}"
    )


# Tensors --------------------------------------------------------------------------------------


def _apart(vit: nn.Module, facts: PlainVit) -> State:
    """Tensors of timm in float32 with q, k and v, and gate and up, taken apart (the names of ``name_in_timm``)."""
    found: State = {}
    for key, value in vit.state_dict().items():
        parts = _names_apart(key, facts)
        found.update(zip(parts, value.detach().float().cpu().clone().chunk(len(parts)), strict=True))
    if "norm.weight" not in found:  # patch-average networks have their only norm behind the pooling
        found |= {re.sub("^fc_norm", "norm", key): value for key, value in found.items() if key.startswith("fc_norm.")}
    return {key: value for key, value in found.items() if not _ONLY_POOLED.match(key)}


def _names_apart(key: str, facts: PlainVit) -> tuple[str, ...]:
    """What the parts of one of timm's tensors are called, along its first dimension."""
    ungated = (r".mlp.up.\1",) if facts.rope is not None else (r".mlp.fc1.\1",)
    rules = (
        (r"\.attn\.qkv\.(\w+)$", tuple(rf".attn.{part}.\1" for part in "qkv")),
        (r"\.attn\.([qv])_bias$", (r".attn.\1.bias",)),
        (r"\.gamma_([12])$", (r".ls\1.gamma",)),
        (r"\.mlp\.fc1_g\.(\w+)$", (r".mlp.gate.\1",)),
        (r"\.mlp\.fc1_x\.(\w+)$", (r".mlp.up.\1",)),
        (r"\.mlp\.fc1\.(\w+)$", (r".mlp.gate.\1", r".mlp.up.\1") if facts.gated else ungated),
    )
    for pattern, names in rules:
        if re.search(pattern, key):
            return tuple(re.sub(pattern, name, key) for name in names)
    return (key,)


def _place_prefix(state: State, vit: Any) -> None:
    """Tokens and table as transformers has them: a row for CLS and none for registers, and always a CLS."""
    table = state.get("pos_embed")
    width = int(vit.embed_dim)
    registers = state.get("reg_token", torch.zeros(1, 0, width))
    cls = state.get("cls_token")
    row = torch.zeros(1, 1, width)
    if table is not None:
        slots = 0 if vit.no_embed_class else int(vit.num_prefix_tokens)
        rows, patches = torch.split(table, [slots, table.shape[1] - slots], dim=1)
        if slots:
            of_cls, of_registers = torch.split(rows, [slots - registers.shape[1], registers.shape[1]], dim=1)
            registers = registers + of_registers
            row = of_cls if cls is not None else row
        state["pos_embed"] = torch.cat([row, patches], dim=1)
    if cls is None:
        cls, registers = torch.split(registers, [1, registers.shape[1] - 1], dim=1)
    state["cls_token"], state["reg_token"] = cls, registers


def _in_names_of(module: nn.Module, state: Mapping[str, Tensor]) -> State:
    """Tensors for a transformers model; what timm has no tensor for changes nothing: zeros, and ones for layer scale.

    Tensors that find no place keep their names, so that strict loading names them.
    """
    found: State = {}
    used = set()
    for key, own in module.state_dict().items():
        source = name_in_timm(key)
        used.add(source)
        if source in state:
            found[key] = state[source]
        elif key.endswith(".lambda1"):
            found[key] = torch.ones(own.shape)
        elif source == "mask_token" or (key.endswith(".bias") and "norm" not in key):
            found[key] = torch.zeros(own.shape)
    empty = {key for key, value in state.items() if not value.numel()}  # registers, where the family has none
    return {**found, **{key: value for key, value in state.items() if key not in used | empty}}


# Words ----------------------------------------------------------------------------------------


def _notes(backbone: Any, kind: type[nn.Module], with_cls: bool, facts: PlainVit) -> list[str]:
    notes = []
    if not with_cls:
        notes.append(
            "the model has no CLS: transformers' CLS and pooler_output are its first register, and the patches start "
            f"at token {backbone.num_register_tokens} as before"
        )
    if any(_ONLY_POOLED.match(key) and not key.startswith("fc_norm") for key in backbone.module.state_dict()):
        notes.append("the head, or the pooling before it, is left out")
    if isinstance(backbone.vit.norm, nn.Identity):
        notes.append("timm norms only the mean patch (fc_norm); here that norm is applied to every token")
    theirs = OF_FAMILY.get(kind)
    if theirs is not None and theirs != backbone.positions:
        side = facts.grid_size[0] * backbone.patch_size
        notes.append(
            f"at other sizes than {side}x{side} the tokens differ from before: {kind.__name__} resizes the position "
            f"table by {_in_words(theirs)}, the source by {_in_words(backbone.positions)}"
        )
    return notes


def _in_words(how: PositionResize) -> str:
    words = [how.mode, "with antialiasing" if how.antialias else "without antialiasing"]
    words += [f"offset {how.offset}"] if how.offset else []
    return ", ".join([*words, "aligned corners"] if how.align_corners else words)
