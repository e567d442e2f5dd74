"""What the names and shapes of a ViT's tensors say about it, in timm's names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

_BLOCK = re.compile(r"^blocks\.(\d+)\.")
_WORDS = {
    "width": "width {}",
    "depth": "{} blocks",
    "patch_size": "patch {} px",
    "cls": "{} CLS",
    "registers": "{} registers",
    "mlp": "{}",
    "layer_scale": "layer scale: {}",
    "qkv_bias": "qkv bias: {}",
}


def architecture_facts(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Width, depth, patch size, CLS and register tokens, MLP kind and layer scale of a timm ViT.

    Args:
        state: {timm name: tensor}, real or on the meta device. What is not in it is not in the
            result either; without a patch embedding and blocks the result is empty.

    Returns:
        ``width`` · ``depth`` · ``patch_size`` · ``cls`` · ``registers`` (counts) · ``mlp``
        ("MLP" or "SwiGLU", with its hidden width) · ``layer_scale`` · ``qkv_bias`` ("yes" or "no")
    """
    patches = state.get("patch_embed.proj.weight")
    blocks = {int(found.group(1)) for key in state if (found := _BLOCK.match(key))}
    if patches is None or patches.ndim != 4 or not blocks:
        return {}
    first = f"blocks.{min(blocks)}"
    facts: dict[str, Any] = {"width": patches.shape[0], "depth": len(blocks), "patch_size": patches.shape[-1]}
    facts["cls"] = int("cls_token" in state)
    facts["registers"] = state["reg_token"].shape[1] if "reg_token" in state else 0
    kind = mlp_kind(state, first)
    if kind is not None:
        facts["mlp"] = "{} of {}".format(*kind)
    facts["layer_scale"] = "yes" if {f"{first}.ls1.gamma", f"{first}.gamma_1"} & set(state) else "no"
    facts["qkv_bias"] = "yes" if {f"{first}.attn.qkv.bias", f"{first}.attn.q_bias"} & set(state) else "no"
    return facts


def mlp_kind(state: Mapping[str, Tensor], block: str = "blocks.0") -> tuple[str, int] | None:
    """("MLP" or "SwiGLU", hidden width) of a block: a gated MLP has twice as many rows before its product."""
    into, out = state.get(f"{block}.mlp.fc1.weight"), state.get(f"{block}.mlp.fc2.weight")
    if out is None:
        return None
    hidden = int(out.shape[1])
    if f"{block}.mlp.fc1_g.weight" in state or (into is not None and into.shape[0] == 2 * hidden):
        return "SwiGLU", hidden
    return ("MLP", hidden) if into is not None and into.shape[0] == hidden else None


def describe_difference(state: Mapping[str, Tensor], model: Mapping[str, Tensor]) -> str:
    """One sentence on how the model in a file differs from the one built; empty if it cannot be told."""
    in_file, built = architecture_facts(state), architecture_facts(model)
    odd = [key for key in in_file if key in built and in_file[key] != built[key]]
    if not odd:
        return ""
    said = [", ".join(_WORDS[key].format(facts[key]) for key in odd) for facts in (in_file, built)]
    return f"The file holds another architecture ({said[0]}) than the model built ({said[1]})"
