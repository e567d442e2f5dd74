"""Selective pooling of the patches in place of a model's own image vector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from regista.backbones.additions import Addition
from regista.layers.selective_pool import SelectivePool, Variant
from regista.tokens import TokenLayout

if TYPE_CHECKING:
    from regista.backbones.base import Backbone


class SelectiveReadOut(Addition):
    """The image vector is the selective pooling of the final patch tokens (2602.22394, section 4).

    Only ``Backbone.global_vector`` changes, and what reads it. The module's own forward and its
    tokens stay as they are. A pooling head is not asked any more, so its attention cannot be captured.

    Args:
        k, variant, eps: See ``SelectivePool``.
    """

    kind = "selective-pool"
    reason = "its image vector is a selective pooling that its library does not know"

    def __init__(self, k: int | float, variant: Variant = "paper", eps: float = 1e-6) -> None:
        super().__init__()
        self.pool = SelectivePool(k, variant, eps)

    def hang(self, backbone: Backbone) -> None:
        """No hooks: the tokens do not change."""

    def bind(self, backbone: Backbone) -> None:
        """Take the place of the adapter's ``global_vector``; a deep copy gets its own."""
        vars(backbone)["global_vector"] = self.global_vector
        vars(backbone)["pool_attention"] = _no_pool_attention

    def global_vector(self, tokens: Tensor, layout: TokenLayout) -> Tensor:
        """(B, N, D) -> (B, D)."""
        pooled: Tensor = self.pool(layout.take(tokens, "patches"))
        return pooled

    def votes(self, tokens: Tensor, layout: TokenLayout) -> Tensor:
        """In how many channels each patch was picked: (B, N, D) -> (B, rows, cols) int64."""
        return layout.to_grid(self.pool.votes(layout.take(tokens, "patches")))

    def to_record(self) -> dict[str, Any]:
        """The settings."""
        return {"kind": self.kind, "k": self.pool.k, "variant": self.pool.variant, "eps": self.pool.eps}

    @classmethod
    def from_record(cls, record: Mapping[str, Any], backbone: Backbone) -> SelectiveReadOut:
        """The same settings."""
        return cls(record["k"], record["variant"], float(record["eps"]))


def _no_pool_attention() -> None:
    """What ``Backbone.pool_attention`` says of a model without such a head."""
