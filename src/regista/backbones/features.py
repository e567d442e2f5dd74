"""What a forward pass gives, and the truth about planted outliers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from regista.tokens import TokenLayout


@dataclass(frozen=True)
class Planted:
    """Ground truth of outliers that were written into a model's weights on purpose.

    Attributes:
        block: The block (from 0) whose MLP writes the outliers.
        neurons: Hidden units of that MLP that were rewired.
        mask: Preprocessed images (B, 3, H, W) -> bool (B, rows, cols), True where an outlier is.
        kind: "content" (moves with the image) or "position" (fixed grid cells).
    """

    block: int
    neurons: tuple[int, ...]
    mask: Callable[[Tensor], Tensor]
    kind: str = "content"


@dataclass(frozen=True)
class Features:
    """What one forward pass gives.

    Attributes:
        tokens: (B, N, D) after the model's final norm, in the model's own order.
        layout: Where each kind of token stands.
        captured: {site: tensor} for the sites that were asked for.
    """

    tokens: Tensor
    layout: TokenLayout
    captured: dict[str, Tensor] = field(default_factory=dict)

    @property
    def cls(self) -> Tensor | None:
        """(B, D), or None for a model without a CLS token."""
        if not self.layout.count("cls"):
            return None
        return self.layout.take(self.tokens, "cls").squeeze(-2)

    @property
    def registers(self) -> Tensor:
        """(B, R, D); R may be 0."""
        return self.layout.take(self.tokens, "registers")

    @property
    def patches(self) -> Tensor:
        """(B, P, D), row by row."""
        return self.layout.take(self.tokens, "patches")

    def patch_map(self) -> Tensor:
        """(B, D, rows, cols)."""
        return self.layout.patch_map(self.tokens)
