"""Register tokens in models whose own code has no place for them: CLIP, SigLIP, plain ViTs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from regista.backbones.additions import Addition
from regista.tokens import Segment, TokenLayout

if TYPE_CHECKING:
    from regista.backbones.base import Backbone


class InsertedRegisters(Addition):
    """Registers that a hook puts behind CLS where the tokens enter the encoder.

    They have no position and pass the encoder's first norm where there is one. A pooling head that
    reads the whole sequence does not get them.

    Args:
        registers: (R, D).
        num_cls_tokens: After how many tokens they stand.
    """

    kind = "inserted-registers"
    reason = "its registers are inserted where its library has no place for them"

    def __init__(self, registers: Tensor, num_cls_tokens: int) -> None:
        super().__init__()
        self.num_register_tokens = len(registers)
        self.num_cls_tokens = num_cls_tokens
        self.tokens = nn.Parameter(registers.detach().clone().unsqueeze(0))  # (1, R, D)

    def register_table(self) -> nn.Parameter:
        """The registers (1, R, D)."""
        return self.tokens

    def append(self, registers: Tensor) -> None:
        """Further registers (R, D) behind those there are."""
        self.tokens = nn.Parameter(torch.cat([self.tokens.detach(), registers.unsqueeze(0)], 1))
        self.num_register_tokens += len(registers)

    def hang(self, backbone: Backbone) -> None:
        """Hang on the entrance of the encoder, and on the pooling head, that the adapter names."""
        module, before = backbone.encoder_entrance()
        if before:
            module.register_forward_pre_hook(self.enter)
        else:
            module.register_forward_hook(self.leave)
        head = backbone.pooling_head()
        if head is not None:
            head.register_forward_pre_hook(self.remove)

    def enter(self, _module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Insert into the input of a module: (B, N, D) -> (B, N + R, D)."""
        first, *rest = args
        return (self.insert(first), *rest)

    def leave(self, _module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        """Insert into the output of a module."""
        return self.insert(output)

    def insert(self, tokens: Tensor) -> Tensor:
        """(B, N, D) -> (B, N + R, D)."""
        layout = self._layout(tokens.shape[-2], 0)
        inserted, _ = layout.insert_registers(tokens, self.tokens.to(tokens.dtype).expand(len(tokens), -1, -1))
        return inserted

    def remove(self, _module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Take the registers out of the input of a module, where they are."""
        first, *rest = args
        kept, _ = self._layout(first.shape[-2], self.num_register_tokens).remove_registers(first)
        return (kept, *rest)

    def _layout(self, length: int, registers: int) -> TokenLayout:
        patches = length - self.num_cls_tokens - registers
        counts = {"cls": self.num_cls_tokens, "registers": registers, "patches": patches}
        return TokenLayout(tuple(Segment(name, count) for name, count in counts.items()), (1, patches), 1)

    def to_record(self) -> dict[str, Any]:
        """How many, and after how many tokens."""
        return {"kind": self.kind, "count": self.num_register_tokens, "num_cls_tokens": self.num_cls_tokens}

    @classmethod
    def from_record(cls, record: Mapping[str, Any], backbone: Backbone) -> InsertedRegisters:
        """Zero registers, to be filled with the weights."""
        return cls(torch.zeros(int(record["count"]), backbone.embed_dim), int(record["num_cls_tokens"]))


def insert_by_hook(backbone: Backbone, registers: Tensor) -> None:
    """Insert registers (R, D), in place, or append them to those inserted before."""
    for addition in backbone.additions:
        if isinstance(addition, InsertedRegisters):
            addition.append(registers)
            return
    backbone.add(InsertedRegisters(registers, backbone.num_cls_tokens))
