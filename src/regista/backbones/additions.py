"""What is put into a model that its own library has no place for.

An addition is a child module of the ViT, so its tensors are in the state dict and follow it to
another device, and it hangs its own methods as hooks on other parts, so a deep copy carries both
and ``backbone.module`` gives the changed tokens by itself, also inside the user's own pipeline.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from regista.registry import Registry

if TYPE_CHECKING:
    from regista.backbones.base import Backbone

# Kinds by the name that a saved model's record has for them; methods of other packages join here.
KINDS = Registry(
    "addition",
    {
        "inserted-registers": "regista.backbones.inserted_registers:InsertedRegisters",
        "register-neurons": "regista.backbones.register_neurons:RegisterNeurons",
        "attention-bias": "regista.backbones.attention_bias:AttentionBias",
        "selective-pool": "regista.backbones.selective_read_out:SelectiveReadOut",
        "denoised-views": "regista.methods.phreg.denoised:DenoisedViews",
        "neighbour-repair": "regista.backbones.neighbour_repair:NeighbourRepair",
    },
    entry_point_group="regista.additions",
)


class Addition(nn.Module, ABC):
    """One thing put into a model.

    Attributes:
        kind: Its name in ``KINDS``.
        needs_fused_attention: Whether it works at ``scaled_dot_product_attention``.
        reason: Why the model's own library cannot read it, for messages.
        num_register_tokens: Register tokens that it puts into the sequence.
    """

    kind: str
    reason: str
    num_register_tokens: int = 0
    needs_fused_attention: bool = False

    @property
    def child_name(self) -> str:
        """Its name among the children of the ViT."""
        return f"regista_{self.kind.replace('-', '_')}"

    @abstractmethod
    def hang(self, backbone: Backbone) -> None:
        """Hang hooks on parts of the module; called once, when it has become its child."""

    def bind(self, backbone: Backbone) -> None:
        """Change how an adapter reads the module; called for each adapter of it, also of a live module."""

    @abstractmethod
    def to_record(self) -> dict[str, Any]:
        """What ``from_record`` needs to build it, as plain values; tensors come with the weights."""

    @classmethod
    @abstractmethod
    def from_record(cls, record: Mapping[str, Any], backbone: Backbone) -> Addition:
        """Build it for a backbone, its tensors still to be filled."""

    def register_table(self) -> nn.Parameter:
        """The registers (1, R, D), of those additions that bring any."""
        raise NotImplementedError(f"{self.kind} has no registers")

    def forward(self, *_args: Any) -> None:
        """Not called: an addition works by its hooks."""
        raise NotImplementedError(f"{self.kind} works by its hooks")


def additions_of(module: nn.Module) -> list[Addition]:
    """The additions in a live module, in the order in which they came."""
    return [child for child in module.children() if isinstance(child, Addition)]


def add_from_records(backbone: Backbone, records: list[Mapping[str, Any]]) -> None:
    """Put into a freshly built model what its record lists, in place.

    Raises:
        ValueError: for a kind that is not known here, or a record that makes no sense.
    """
    for record in records:
        kind: Any = KINDS.get(str(record.get("kind")))
        try:
            addition = kind.from_record(record, backbone)
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"{backbone.name}: the record of {record.get('kind')!r} makes no sense: {error!r}"
            ) from None
        backbone.add(addition)
        backbone.num_register_tokens += addition.num_register_tokens
