"""Registers in the transformers models that have a place for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.dinov2_with_registers.configuration_dinov2_with_registers import Dinov2WithRegistersConfig
from transformers.models.dinov2_with_registers.modeling_dinov2_with_registers import Dinov2WithRegistersModel

from regista.backbones.additions import Addition
from regista.backbones.meta_build import to_be_filled
from regista.backbones.weights import load_strict

_SHARED = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "mlp_ratio",
    "hidden_act",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "initializer_range",
    "layer_norm_eps",
    "image_size",
    "patch_size",
    "num_channels",
    "qkv_bias",
    "layerscale_value",
    "drop_path_rate",
    "use_swiglu_ffn",
)


@torch.no_grad()
def append_registers(vit: Any, registers: Tensor) -> None:
    """Registers (R, D) behind those of a Dinov2WithRegisters or DINOv3, in place; the configuration counts them."""
    old = vit.embeddings.register_tokens
    vit.embeddings.register_tokens = nn.Parameter(torch.cat([old, registers.unsqueeze(0)], 1))
    vit.config.num_register_tokens = int(old.shape[1]) + len(registers)


@torch.no_grad()
def with_register_class(vit: Any, registers: Tensor) -> Any:
    """A Dinov2Model's weights as a Dinov2WithRegistersModel with registers (R, D).

    What was added to it, and hooks, stay behind.

    Raises:
        ValueError: if a tensor of the one has no place in the other.
    """
    settings = {name: getattr(vit.config, name) for name in _SHARED}
    config = Dinov2WithRegistersConfig(**settings, num_register_tokens=len(registers))
    config._attn_implementation = vit.config._attn_implementation
    with to_be_filled(True):
        module = Dinov2WithRegistersModel(config)
    added = tuple(f"{name}." for name, child in vit.named_children() if isinstance(child, Addition))
    own = {key: value for key, value in vit.state_dict().items() if not key.startswith(added)}
    state = {**own, "embeddings.register_tokens": registers.unsqueeze(0)}
    if "embeddings.mask_token" not in state:
        state["embeddings.mask_token"] = registers.new_zeros(1, registers.shape[-1])
    load_strict(module, state, name="Dinov2 with registers")
    trainable = {name: parameter.requires_grad for name, parameter in vit.named_parameters()}
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(trainable.get(name, True))
    moved: Any = module
    return moved.to(registers.device, registers.dtype).train(vit.training)
