"""Describing a live timm ViT so that bare timm builds the same one."""

from __future__ import annotations

import json
import re
from typing import Any

from torch import nn

from regista.backbones.meta_build import shapes_only
from regista.backbones.timm import TimmBackbone

PLAIN_ARCHITECTURE = "vit_tiny_patch16_224"  # every argument is given, so any plain one will do
_SOURCES = ("url", "file", "hf_hub_id", "hf_hub_filename", "source", "state_dict", "custom_load", "label_offset")
_NOT_STRUCTURE = ("pretrained_cfg", "pretrained_cfg_overlay", "drop_rate", "device", "dtype")
_DROPOUT_LINES = re.compile(r"^\s*\(\w*drop\w*\): .*\n", re.MULTILINE)


def timm_config(backbone: TimmBackbone) -> dict[str, Any]:
    """Content of ``config.json`` in timm's hub format.

    Raises:
        ValueError: if timm cannot build this module from a name and plain arguments.
    """
    module: Any = backbone.module
    architecture, arguments = rebuild_arguments(module, backbone.name)
    trained = {
        key: value
        for key, value in dict(getattr(module, "pretrained_cfg", None) or {}).items()
        if key not in (*_SOURCES, "architecture") and value is not None and _is_json(value)
    }
    height, width = _traits(module)["img_size"]
    defaults = {"interpolation": "bicubic", "crop_pct": 1.0, "first_conv": "patch_embed.proj", "classifier": "head"}
    return {
        "architecture": architecture,
        "num_classes": module.num_classes,
        "num_features": module.num_features,
        "global_pool": module.global_pool,
        "model_args": arguments,
        "pretrained_cfg": {
            **defaults,
            **trained,
            "custom_load": False,
            "input_size": [3, height, width],
            "fixed_input_size": not module.dynamic_img_size,
            "num_classes": module.num_classes,
            "mean": list(backbone.mean),
            "std": list(backbone.std),
        },
    }


def rebuild_arguments(module: Any, name: str) -> tuple[str, dict[str, Any]]:
    """A registered architecture and the arguments that make it this module.

    Starts from what timm's factory was given, adds what differs in the module as it is now, and
    compares every layer of what that builds with the module's.

    Raises:
        ValueError: if they differ all the same, naming the first difference.
    """
    from timm.models import VisionTransformer, create_model, is_model

    architecture = dict(getattr(module, "pretrained_cfg", None) or {}).get("architecture")
    if architecture is None or not is_model(architecture):
        if type(module) is not VisionTransformer:
            raise ValueError(f"{name}: a {type(module).__name__} that timm.create_model did not make cannot be saved")
        architecture = PLAIN_ARCHITECTURE
    given = {
        key: value
        for key, value in getattr(module, "_model_args", {}).items()
        if key not in _NOT_STRUCTURE and not key.endswith("_drop_rate") and _is_json(value)
    }
    own, arguments = _traits(module), given
    with shapes_only():
        built = create_model(architecture, pretrained=False, **arguments)
        for _ in range(3):  # an argument may change what another one defaults to
            traits = _traits(built)
            changed = {key: value for key, value in own.items() if value != traits.get(key)}
            if not changed:
                break
            arguments = {**arguments, **changed}
            built = create_model(architecture, pretrained=False, **arguments)
    difference = _difference(module, built)
    if difference:
        raise ValueError(f"{name}: timm cannot build this model from a name and plain arguments: {difference}")
    plain: dict[str, Any] = json.loads(json.dumps(arguments))
    return str(architecture), plain


def _traits(module: Any) -> dict[str, Any]:
    """Arguments of timm's constructors, read off a ``VisionTransformer`` or ``Eva``."""
    block = next(iter(module.blocks))
    patch, attention = module.patch_embed, getattr(block, "attn", block)
    mlp_in = _first(getattr(block, "mlp", None), "fc1", "fc1_x")
    registers = 0 if module.reg_token is None else int(module.reg_token.shape[1])
    traits = {
        "img_size": tuple(int(cells * side) for cells, side in zip(patch.grid_size, patch.patch_size, strict=True)),
        "patch_size": int(max(patch.patch_size)),
        "num_classes": int(module.num_classes),
        "global_pool": module.global_pool,
        "embed_dim": int(module.embed_dim),
        "depth": len(module.blocks),
        "num_heads": int(attention.num_heads),
        "class_token": module.cls_token is not None,
        "no_embed_class": bool(module.no_embed_class),
        "init_values": 1e-5 if _has_layer_scale(block) else None,
        "dynamic_img_size": bool(module.dynamic_img_size),
    }
    if mlp_in is not None:
        traits["mlp_ratio"] = mlp_ratio_for(int(mlp_in.out_features), int(module.embed_dim))
    if hasattr(module, "rope"):
        return {**traits, "num_reg_tokens": registers}
    qkv = getattr(attention, "qkv", None)
    return {
        **traits,
        "reg_tokens": registers,
        "qkv_bias": None if qkv is None else qkv.bias is not None,
        "qk_norm": not isinstance(getattr(attention, "q_norm", nn.Identity()), nn.Identity),
        "pos_embed": "none" if module.pos_embed is None else "learn",
        "pre_norm": not isinstance(module.norm_pre, nn.Identity),
        "final_norm": not (isinstance(module.norm, nn.Identity) and isinstance(module.fc_norm, nn.Identity)),
        "fc_norm": not isinstance(module.fc_norm, nn.Identity),
        "pool_include_prefix": bool(getattr(module, "pool_include_prefix", False)),
    }


def _difference(module: Any, built: Any) -> str:
    """The first thing in which two modules differ, dropout apart; empty if they are alike."""
    shapes, wanted = ({key: tuple(x.shape) for key, x in m.state_dict().items()} for m in (built, module))
    for key in {**wanted, **shapes}:
        if shapes.get(key) != wanted.get(key):
            return f"{key} is {wanted.get(key, 'not in it')}, timm builds {shapes.get(key, 'none')}"
    lines, other = (_DROPOUT_LINES.sub("", repr(m) + "\n").splitlines() for m in (module, built))
    for line, theirs in zip(lines, other, strict=False):
        if line != theirs:
            return f"it has {line.strip()!r}, timm builds {theirs.strip()!r}"
    own, theirs_too = _traits(module), _traits(built)
    odd = [key for key in own if own[key] != theirs_too.get(key)]
    return f"{odd} cannot be given" if odd or len(lines) != len(other) else ""


def _has_layer_scale(block: Any) -> bool:
    return isinstance(getattr(getattr(block, "ls1", None), "gamma", getattr(block, "gamma_1", None)), nn.Parameter)


def _first(module: Any, *names: str) -> Any:
    return next((getattr(module, name) for name in names if hasattr(module, name)), None)


def mlp_ratio_for(hidden: int, width: int) -> float:
    """A ratio from which timm's ``int(width * ratio)`` gives ``hidden``."""
    ratio = hidden / width
    return ratio if int(width * ratio) == hidden else (hidden + 0.5) / width


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
