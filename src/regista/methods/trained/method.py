"""Insert learnable register tokens into a pretrained ViT."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regista.backbones.base import Backbone
from regista.methods.protocol import Method, Progress, State, Workspace
from regista.methods.trained.config import TrainedConfig

UNTRAINED = (
    "the registers are random and untrained, so features change and nothing is cured yet; train them with an objective"
)


class Trained(Method):
    """The insertion half of trained registers (2309.16588, section 2.2); training is an objective's."""

    name = "trained"
    summary = "insert learnable registers, to be trained"
    config_class = TrainedConfig
    needs_images = False

    def outline(self, backbone: Backbone) -> Backbone:
        """The result itself."""
        return self.apply(backbone, self.fit(backbone))

    def fit(
        self,
        backbone: Backbone,
        images: Any = None,
        *,
        progress: Progress | None = None,
        workspace: Workspace | None = None,
    ) -> State:
        """Draw the registers; no image is looked at."""
        config: TrainedConfig = self.config
        registers = initial_registers(config.registers, backbone.embed_dim, std=config.std, seed=config.seed)
        notes = (UNTRAINED,) if config.registers else ()
        return State({"registers": config.registers}, {"registers": registers}, notes)

    def apply(self, backbone: Backbone, state: State) -> Backbone:
        """Insert them behind CLS and the registers there are."""
        return backbone.with_registers(state.tensors["registers"])


def initial_registers(count: int, embed_dim: int, *, std: float = 1.0, seed: int = 0) -> Tensor:
    """Random registers, no two alike: (R, D) from N(0, std^2 / D), so of length about ``std``.

    The variance 1/D is that of PH-Reg's released code (2505.21501). Registers that start equal
    would get equal gradients and stay equal, and one register would do the work of all.
    """
    generator = torch.Generator().manual_seed(seed)
    registers: Tensor = torch.randn(count, embed_dim, generator=generator) * (std * embed_dim**-0.5)
    return registers


METHOD = Trained
