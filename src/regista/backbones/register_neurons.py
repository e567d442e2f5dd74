"""Test-time registers (2506.08010): register neurons act on a register token instead of on patches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from regista.backbones.additions import Addition
from regista.tokens import Segment, TokenLayout

if TYPE_CHECKING:
    from regista.backbones.base import Backbone

Variant = Literal["paper", "released"]


class RegisterNeurons(Addition):
    """Moves the activation of chosen MLP units from all tokens to the registers.

    At the input of an MLP's last linear layer, each chosen unit becomes zero on every token but the
    registers, where it becomes its own value of largest magnitude over all tokens (2506.08010,
    algorithm 1, which says maximum; outlier activations are positive). Every image of a batch by itself.

    Args:
        neurons: {block: units}.
        segments: (name, count) of the tokens before the patches, in order; the last
            ``num_test_time`` registers are those that receive.
        num_test_time: How many registers receive; with 0 the units are only silenced.
        variant: "paper"; "released" gives all units of a block the one value of largest
            magnitude among them, and leaves CLS its activation.

    Raises:
        ValueError: for another variant, or more receiving registers than there are.
    """

    kind = "register-neurons"
    reason = "its register neurons act through a hook"

    def __init__(
        self,
        neurons: Mapping[int, Sequence[int]],
        segments: Sequence[tuple[str, int]],
        num_test_time: int,
        variant: Variant = "paper",
    ) -> None:
        super().__init__()
        if variant not in ("paper", "released"):
            raise ValueError(f"variant is 'paper' or 'released', got {variant!r}")
        registers = sum(int(count) for name, count in segments if name == "registers")
        if not 0 <= num_test_time <= registers:
            raise ValueError(f"{num_test_time} registers cannot receive where there are {registers}")
        self.neurons = {block: tuple(sorted(set(units))) for block, units in sorted(neurons.items()) if units}
        self.segments = tuple((name, int(count)) for name, count in segments)
        self.num_test_time = num_test_time
        self.variant = variant
        for block, units in self.neurons.items():
            self.register_buffer(f"block_{block}", torch.tensor(units, dtype=torch.long))

    def hang(self, backbone: Backbone) -> None:
        """On the last linear layer of each MLP with chosen units.

        Raises:
            ValueError: for a block or unit that the model does not have.
        """
        sites = dict(enumerate(backbone.block_sites()))
        for block, units in self.neurons.items():
            if block not in sites:
                raise ValueError(f"{backbone.name} has blocks 0 to {len(sites) - 1}, got {block}")
            hidden = int(next(iter(sites[block].mlp_out.parameters())).shape[-1])
            if max(units) >= hidden or min(units) < 0:
                wrong = [unit for unit in units if not 0 <= unit < hidden]
                raise ValueError(f"block {block} of {backbone.name} has MLP units 0 to {hidden - 1}, got {wrong}")
            sites[block].mlp_out.register_forward_pre_hook(partial(_edit, self, block))

    def edit(self, block: int, hidden: Tensor) -> Tensor:
        """(B, N, hidden) -> (B, N, hidden), of one block."""
        units: Tensor = getattr(self, f"block_{block}")
        layout = self._layout(hidden.shape[-2])
        chosen = hidden.index_select(-1, units)  # (B, N, n)
        largest, smallest = chosen.amax(-2, keepdim=True), chosen.amin(-2, keepdim=True)
        value = torch.where(largest >= -smallest, largest, smallest)  # (B, 1, n)
        if self.variant == "released":
            value = value.gather(-1, value.abs().argmax(-1, keepdim=True)).expand_as(value)
        parts = {name: torch.zeros_like(part) for name, part in layout.split(chosen).items()}
        if self.variant == "released":
            parts["cls"] = layout.take(chosen, "cls")
        kept = layout.count("registers") - self.num_test_time
        received = value.expand(-1, self.num_test_time, -1)
        silent, _ = torch.split(parts["registers"], [kept, self.num_test_time], -2)
        parts["registers"] = torch.cat([silent, received], -2)
        return hidden.index_copy(-1, units, layout.join(parts))

    def _layout(self, length: int) -> TokenLayout:
        patches = length - sum(count for _, count in self.segments)
        segments = (*(Segment(name, count) for name, count in self.segments), Segment("patches", patches))
        return TokenLayout(segments, (1, patches), 1)

    def to_record(self) -> dict[str, Any]:
        """Blocks and units, and the tokens before the patches."""
        return {
            "kind": self.kind,
            "neurons": {str(block): list(units) for block, units in self.neurons.items()},
            "segments": [list(segment) for segment in self.segments],
            "num_test_time": self.num_test_time,
            "variant": self.variant,
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any], backbone: Backbone) -> RegisterNeurons:
        """The same units; ``backbone`` must have the registers already."""
        neurons = {int(block): [int(unit) for unit in units] for block, units in record["neurons"].items()}
        segments = [(str(name), int(count)) for name, count in record["segments"]]
        return cls(neurons, segments, int(record["num_test_time"]), record["variant"])


def prefix_segments(layout: TokenLayout) -> list[tuple[str, int]]:
    """(name, count) of all tokens that stand before the patches.

    Raises:
        ValueError: if there are tokens behind the patches.
    """
    *before, last = layout.segments
    if last.name != "patches":
        raise ValueError(f"register neurons need the patches at the end of the sequence, got {layout}")
    return [(segment.name, segment.count) for segment in before]


def _edit(addition: RegisterNeurons, block: int, _module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    first, *rest = args
    return (addition.edit(block, first), *rest)
