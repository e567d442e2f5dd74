"""Timm models from weight files: built to fit the file where that loses nothing, then loaded strictly."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from regista.backbones.architecture import architecture_facts
from regista.backbones.key_maps import ANCHORS, Converted, position_grid_count, to_timm
from regista.backbones.meta_build import shapes_only, to_be_filled
from regista.backbones.positions import PositionResize
from regista.backbones.timm import TimmBackbone
from regista.backbones.weights import choose_part, load_strict
from regista.tokens import square_grid

Create = Callable[..., nn.Module]


def backbone_from_file(
    create: Create,
    tensors: Mapping[str, Tensor],
    *,
    name: str,
    source: str,
    image_size: tuple[int, int] | None = None,
    allow_partial: bool = False,
    positions: PositionResize | None = None,
) -> TimmBackbone:
    """Build a timm model for the tensors of a file and fill it.

    A position table of another grid than the architecture's is never resampled: the model is built
    at the size the table is for. Heads are kept with their own number of classes. The notes of
    the backbone say so.

    Args:
        create: Makes the model with its usual arguments; keywords change them.
        tensors: Names as in the file, with any prefix.
        source: Of the file, for messages.
        image_size: For ``preprocess``; where the table is not square, what it is for.
        positions: How to resize the table; the convention of the file's format by default.

    Raises:
        ValueError: if the architecture is not one that can be looked into, or the file does not
            fill it (see ``load_strict``).
    """
    with shapes_only():
        probe = create()
    TimmBackbone(probe, name=name)  # refuses what cannot be looked into before anything is read
    wanted = {key: value.shape for key, value in probe.state_dict().items()}

    def fit(state: Mapping[str, Tensor]) -> tuple[int, ...]:
        found = to_timm(state, probe).state
        return sum(key in wanted for key in found), sum(wanted.get(key) == x.shape for key, x in found.items())

    part = choose_part(tensors, ANCHORS, fit)
    converted = to_timm(part.state, probe)
    arguments, notes = _arguments_for(converted, probe, image_size)
    with to_be_filled(not allow_partial):
        module = create(**arguments)
    if converted.stored_rows is not None and "img_size" in arguments:
        converted = to_timm(part.state, module)  # with the table as it is stored
    try:
        report = load_strict(module, converted.state, allow_partial, name=source)
    except ValueError as error:
        raise ValueError(f"{error}{_other_names(converted.state, probe)}") from None
    backbone = TimmBackbone(module.eval(), name=name, positions=positions or converted.positions, image_size=image_size)
    backbone.notes += [f"{source}: {report}", f"{source}: in the names of {converted.format}", *part.notes, *notes]
    return backbone


def _arguments_for(
    converted: Converted, probe: Any, image_size: tuple[int, int] | None
) -> tuple[dict[str, Any], list[str]]:
    """Arguments that make the model fit the file, and what to say about them."""
    state, arguments, notes = converted.state, dict[str, Any](), list[str]()
    head = state.get("head.weight")
    classes = int(head.shape[0]) if head is not None and head.ndim == 2 else 0
    if classes != probe.num_classes:
        arguments["num_classes"] = classes
    own_norm = {key.partition(".")[0] for key in probe.state_dict()} & {"norm", "fc_norm"}
    if "fc_norm.weight" in state and "norm.weight" not in state and own_norm == {"norm"}:
        arguments["global_pool"] = "avg"
    count, built = position_grid_count(converted, probe), tuple(probe.patch_embed.grid_size)
    facts, own = architecture_facts(state), architecture_facts(probe.state_dict())
    same_kind = all(facts.get(key) == own.get(key) for key in ("width", "patch_size", "cls", "registers"))
    if same_kind and count is not None and count != built[0] * built[1]:
        patch = int(max(probe.patch_embed.patch_size))
        grid = _stored_grid(count, patch, image_size)
        arguments["img_size"] = (grid[0] * patch, grid[1] * patch)
        notes.append(
            f"built for {grid[0] * patch}x{grid[1] * patch} px, as the stored position table is of {grid[0]}x{grid[1]} "
            f"cells; the architecture's own is of {built[0]}x{built[1]}"
        )
    return arguments, notes


def _stored_grid(count: int, patch: int, image_size: tuple[int, int] | None) -> tuple[int, int]:
    try:
        return square_grid(count)
    except ValueError as error:
        grid = (image_size[0] // patch, image_size[1] // patch) if image_size else (0, 0)
        if grid[0] * grid[1] == count:
            return grid
        raise ValueError(
            f"the stored position table is of {count} patches: {error}, as image_size=(height, width); got {image_size}"
        ) from None


def _other_names(state: Mapping[str, Tensor], probe: Any) -> str:
    """Architectures of timm that differ from this one only in the number of registers, if that is the trouble."""
    from timm.models import list_models

    registers = architecture_facts(state).get("registers")
    own = str(probe.pretrained_cfg.get("architecture", "")) if hasattr(probe, "pretrained_cfg") else ""
    if registers is None or not own or registers == architecture_facts(probe.state_dict()).get("registers"):
        return ""
    marked = f"_reg{registers}" if registers else ""
    found = [name for name in list_models("vit_*") if _without_registers(name) == _without_registers(own)]
    fitting = [name for name in found if (marked in name if marked else "_reg" not in name)]
    return f"; try {' or '.join(fitting)}" if fitting else ""


def _without_registers(name: str) -> str:
    return re.sub(r"_reg\d+(?=_|$)", "", name)
