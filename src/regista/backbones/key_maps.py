"""Bringing the weights of other libraries into timm's names.

The formats are told apart by their names, never by the file's. Sources of the names: DINOv2's and
DINOv3's torch.hub code, transformers 4.56 to 5, timm 1.0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from regista.backbones.positions import DINOV2_HUB, TIMM, TRANSFORMERS, PositionResize

State = dict[str, Tensor]
ANCHORS = (
    "patch_embed.proj.weight",
    "embeddings.patch_embeddings.projection.weight",
    "embeddings.patch_embeddings.weight",
    "visual.conv1.weight",
)
_QKV = ("q", "k", "v")
_DINOV2_CHUNK = re.compile(r"^blocks\.(\d+)\.(\d+)\.")

# Names of transformers, as in memory and as on disk, to timm's: (pattern, replacement).
_LAYERS = r"^(?:encoder\.|model\.)?layers?\.(\d+)\."
_TRANSFORMERS = (
    (r"^embeddings\.cls_token$", "cls_token"),
    (r"^embeddings\.register_tokens$", "reg_token"),
    (r"^embeddings\.position_embeddings$", "pos_embed"),
    (r"^embeddings\.mask_token$", "mask_token"),
    (r"^embeddings\.patch_embeddings\.(?:projection\.)?", "patch_embed.proj."),
    (_LAYERS, r"blocks.\1."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"\.attention\.(?:attention\.)?([qkv])(?:uery|ey|alue|_proj)\.", r".attn.\1."),
    (r"\.attention\.(?:o_proj|output\.dense)\.", ".attn.proj."),
    (r"\.layer_scale([12])\.lambda1$", r".ls\1.gamma"),
    (r"\.intermediate\.dense\.", ".mlp.fc1."),
    (r"(blocks\.\d+)\.output\.dense\.", r"\1.mlp.fc2."),
    (r"\.mlp\.weights_in\.", ".mlp.fc1."),
    (r"\.mlp\.weights_out\.", ".mlp.fc2."),
    (r"\.mlp\.gate_proj\.", ".mlp.gate."),
    (r"\.mlp\.up_proj\.", ".mlp.up."),
    (r"\.mlp\.down_proj\.", ".mlp.fc2."),
    (r"^layernorm\.", "norm."),
)


@dataclass(frozen=True)
class Converted:
    """A state dict in timm's names.

    Attributes:
        state: {timm name: tensor}; what has no place in timm keeps its name.
        format: Where the names come from, for people.
        positions: How this family resizes its position table.
        stored_rows: Of the position table in the file, where timm has resampled it to the module's.
    """

    state: State
    format: str
    positions: PositionResize = TIMM
    stored_rows: int | None = None


def to_timm(state: Mapping[str, Tensor], module: nn.Module) -> Converted:
    """Rename and regroup the tensors of one model for a timm ``VisionTransformer`` or ``Eva``.

    Known formats: timm; torch.hub's DINOv2 and DINOv3; transformers' Dinov2,
    Dinov2WithRegisters, DINOv3ViT and ViT, in their names on disk and in memory; and what
    timm's own filters know (CLIP, open_clip and others).

    Args:
        state: Without a prefix (see ``weights.choose_part``), also on the meta device.
        module: What it is for: whether CLS has a position slot and how attention and gated MLPs are
            stored are read from it.
    """
    names = set(state)
    for word, belongs, convert in _FORMATS:
        if belongs(names):
            found = convert(dict(state), module, word)
            empty = [key for key, value in found.state.items() if not value.numel()]  # registers, where R is 0
            return replace(found, state={key: value for key, value in found.state.items() if key not in empty})
    return _through_timm(dict(state), module)


def name_in_timm(key: str) -> str:
    """The place of one of transformers' tensors in timm's names, attention and gated MLPs taken apart.

    So ``encoder.layer.0.attention.q_proj.weight`` is ``blocks.0.attn.q.weight``, and a gated MLP has ``mlp.gate``
    and ``mlp.up``. Names of other families stay as they are.
    """
    for pattern, replacement in _TRANSFORMERS:
        key = re.sub(pattern, replacement, key)
    return key


def position_grid_count(converted: Converted, module: Any) -> int | None:
    """How many patches the position table in the file is for; None without a table."""
    table = converted.state.get("pos_embed")
    if table is None or table.ndim != 3:
        return None
    rows = int(table.shape[1]) if converted.stored_rows is None else converted.stored_rows
    return rows - (0 if module.no_embed_class else int(module.num_prefix_tokens))


# The formats ----------------------------------------------------------------------------------


def _from_timm(state: State, module: nn.Module, word: str) -> Converted:
    """Names of timm, and DeiT III's ``gamma_1``."""
    if "blocks.0.ls1.gamma" in module.state_dict():
        state = {re.sub(r"^(blocks\.\d+)\.gamma_([12])$", r"\1.ls\2.gamma", key): x for key, x in state.items()}
    return Converted(state, word)


def _from_dinov2_hub(state: State, module: Any, word: str) -> Converted:
    """``register_tokens`` behind CLS, positions for CLS and patches, ``mlp.w12`` and ``w3``."""
    renamed: State = {}
    for key, value in _unchunked(state).items():
        key = re.sub(r"\.mlp\.w12\.", ".mlp.fc1.", re.sub(r"\.mlp\.w3\.", ".mlp.fc2.", key))
        renamed[re.sub(r"^register_tokens$", "reg_token", key)] = value
    with_registers = "reg_token" in renamed
    _place_prefix(renamed, module)
    word = f"{word} {'with' if with_registers else 'without'} registers"
    return Converted(renamed, word, TIMM if with_registers else DINOV2_HUB)


def _from_transformers(state: State, module: Any, word: str) -> Converted:
    """Dinov2, Dinov2WithRegisters and ViT."""
    renamed = _fused_qkv(_renamed(state))
    with_registers = "reg_token" in renamed
    if "blocks.0.ls1.gamma" not in renamed:  # ViT's classifier reads CLS alone, as timm's head does
        renamed = {re.sub(r"^classifier\.", "head.", key): value for key, value in renamed.items()}
    _place_prefix(renamed, module)
    return Converted(_gated(renamed, module), word, TIMM if with_registers else TRANSFORMERS)


def _from_dinov3_hub(state: State, module: Any, word: str) -> Converted:
    """``storage_tokens``, qkv biases of which the key's part is masked, ``mlp.w1``, ``w2``, ``w3``."""
    renamed: State = {}
    for key, value in _unchunked(state).items():
        key = re.sub(r"\.mlp\.w1\.", ".mlp.gate.", re.sub(r"\.mlp\.w2\.", ".mlp.up.", key))
        key = re.sub(r"\.mlp\.w3\.", ".mlp.fc2.", key)
        renamed[re.sub(r"^storage_tokens$", "reg_token", key)] = value
    return Converted(_for_eva(renamed, module), word)


def _from_dinov3_transformers(state: State, module: Any, word: str) -> Converted:
    """Separate q, k and v, of which the key has no bias; gate, up and down of a gated MLP."""
    return Converted(_for_eva(_fused_qkv(_renamed(state)), module), word)


def _through_timm(state: State, module: Any) -> Converted:
    """What timm itself can convert: CLIP, towers of open_clip, EVA and others.

    Raises:
        ValueError: for patches of another size, whose kernel timm would resample without a word.
    """
    from timm.models import eva, vision_transformer

    filters = eva if isinstance(module, eva.Eva) else vision_transformer
    own = int(module.patch_embed.proj.weight.shape[-1])
    for key, value in state.items():
        if re.search(r"(^|\.)(conv1|patch_embed\.proj)\.weight$", key) and value.ndim == 4 and value.shape[-1] != own:
            raise ValueError(f"{key} in the file is for patches of {value.shape[-1]} px, the model has {own} px")
    known = re.compile(r"((^|\.)pos_embed|(^|\.)visual\.positional_embedding)$")
    tables = [value for key, value in state.items() if known.search(key)]
    tables = [table for table in tables if table.ndim in (2, 3) and table.shape[-1] == module.embed_dim]
    rows = next((int(table.shape[-2]) for table in tables), None)
    try:
        converted: State = filters.checkpoint_filter_fn(state, module)
    except Exception:  # it is written for files it knows; for others anything may be missing
        return Converted(state, "an unknown format")
    return Converted(converted, "a format that timm converts", stored_rows=rows)


def _has(names: set[str], *patterns: str) -> bool:
    """Whether each pattern is found in some name."""
    return all(any(re.search(pattern, name) for name in names) for pattern in patterns)


def _is_dinov2_hub(names: set[str]) -> bool:
    """Told from timm by one of these; a file with none of them reads the same as timm's."""
    layer_scale = "blocks.0.ls1.gamma" in names or _has(names, _DINOV2_CHUNK.pattern)
    odd = _has(names, r"^register_tokens$") or _has(names, r"\.mlp\.w12\.") or _has(names, _DINOV2_CHUNK.pattern)
    return "patch_embed.proj.weight" in names and (odd or (layer_scale and "mask_token" in names))


_CONVOLUTION = r"^embeddings\.patch_embeddings\.projection\.weight$"
_FORMATS: tuple[tuple[str, Callable[[set[str]], bool], Callable[[State, Any, str], Converted]], ...] = (
    (
        "DINOv3 of transformers",
        lambda names: _has(names, r"^embeddings\.patch_embeddings\.weight$"),
        _from_dinov3_transformers,
    ),
    (
        "DINOv2 of transformers",
        lambda names: _has(names, _CONVOLUTION, r"\.layer_scale1\.lambda1$"),
        _from_transformers,
    ),
    ("ViT of transformers", lambda names: _has(names, _CONVOLUTION, r"\.layernorm_before\."), _from_transformers),
    (
        "DINOv3 of torch.hub",
        lambda names: _has(names, r"^patch_embed\.proj\.weight$", r"^(storage_tokens$|rope_embed\.)"),
        _from_dinov3_hub,
    ),
    ("DINOv2 of torch.hub", _is_dinov2_hub, _from_dinov2_hub),
    (
        "timm",
        lambda names: _has(names, r"^patch_embed\.proj\.weight$", r"^blocks\.0\.(norm1|attn)\."),
        _from_timm,
    ),
)


# Steps ----------------------------------------------------------------------------------------


def _renamed(state: State) -> State:
    return {name_in_timm(key): value for key, value in state.items()}


def _fused_qkv(state: State) -> State:
    """``attn.q``, ``attn.k`` and ``attn.v`` to ``attn.qkv``, in this order; a bias that is not there is zero."""
    fused = {key: value for key, value in state.items() if not re.search(r"\.attn\.[qkv]\.(weight|bias)$", key)}
    for block in sorted({key.split(".attn.q.")[0] for key in state if key.endswith(".attn.q.weight")}):
        weights = [state.get(f"{block}.attn.{part}.weight") for part in _QKV]
        if any(weight is None for weight in weights):
            return state  # named as missing when it is loaded
        fused[f"{block}.attn.qkv.weight"] = torch.cat([weight for weight in weights if weight is not None])
        biases = [state.get(f"{block}.attn.{part}.bias") for part in _QKV]
        given = [bias for bias in biases if bias is not None]
        if given:
            zero = torch.zeros_like(given[-1])
            fused[f"{block}.attn.qkv.bias"] = torch.cat([zero if bias is None else bias for bias in biases])
    return fused


def _place_prefix(state: State, module: Any) -> None:
    """Give CLS its position as ``module`` expects it: folded into the token, or a row of the table.

    The source's table has a row for CLS and none for registers.
    """
    table, cls = state.get("pos_embed"), state.get("cls_token")
    if table is None or cls is None or table.ndim != 3 or not hasattr(module, "no_embed_class"):
        return
    row, patches = torch.split(table, [1, table.shape[1] - 1], dim=1)
    if module.no_embed_class:
        state["cls_token"], state["pos_embed"] = cls + row, patches
    elif "reg_token" in state:
        state["pos_embed"] = torch.cat([row, torch.zeros_like(state["reg_token"]), patches], dim=1)


def _gated(state: State, module: nn.Module) -> State:
    """``mlp.gate`` and ``mlp.up`` as the module has them: packed in ``fc1``, gate first, or ``fc1_g`` and ``fc1_x``."""
    apart = any(key.endswith(".mlp.fc1_g.weight") for key in module.state_dict())
    joined: State = {}
    for key, value in state.items():
        found = re.match(r"^(.*\.mlp\.)(gate|up)\.(weight|bias)$", key)
        if not found:
            joined[key] = value
            continue
        stem, part, kind = found.groups()
        if apart:
            joined[f"{stem}{'fc1_g' if part == 'gate' else 'fc1_x'}.{kind}"] = value
        elif part == "gate" and f"{stem}up.{kind}" in state:
            joined[f"{stem}fc1.{kind}"] = torch.cat([value, state[f"{stem}up.{kind}"]])
    return joined


def _for_eva(state: State, module: nn.Module) -> State:
    """Layer scale, biases and MLPs in the names of timm's ``Eva``.

    A bias of the keys adds the same number to all logits of a query, so it changes nothing and is
    dropped. Biases of queries and values that are all zero are dropped where the module has none.
    """
    has_bias = "blocks.0.attn.q_bias" in module.state_dict()
    if has_bias and not any(key.endswith(".attn.qkv.bias") for key in state):
        weights = {key: value for key, value in state.items() if key.endswith(".attn.qkv.weight")}
        state = state | {key.replace(".weight", ".bias"): x.new_zeros(len(x)) for key, x in weights.items()}
    renamed: State = {}
    for key, value in state.items():
        key = re.sub(r"\.ls([12])\.gamma$", r".gamma_\1", key)
        if key.endswith(".attn.qkv.bias"):
            stem = key.removesuffix("qkv.bias")
            query, _, values = value.chunk(3)
            if has_bias or value.is_meta or bool(query.any()) or bool(values.any()):
                renamed |= {f"{stem}q_bias": query, f"{stem}v_bias": values}
            continue
        if re.search(r"\.mlp\.up\.", key) and not any(".mlp.gate." in name for name in state):
            key = key.replace(".mlp.up.", ".mlp.fc1.")
        renamed[key] = value
    return _gated(renamed, module)


def _unchunked(state: State) -> State:
    """``blocks.chunk.block.`` of FSDP training to ``blocks.block.``; blocks are counted through or by chunk."""
    places = sorted({tuple(map(int, found.groups())) for key in state if (found := _DINOV2_CHUNK.match(key))})
    if not places:
        return state
    through = len({block for _, block in places}) == len(places)
    index = {place: place[1] if through else number for number, place in enumerate(places)}

    def whole(found: re.Match[str]) -> str:
        chunk, block = found.groups()
        return f"blocks.{index[int(chunk), int(block)]}."

    return {_DINOV2_CHUNK.sub(whole, key): value for key, value in state.items()}
