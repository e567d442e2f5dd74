"""The student: the teacher's weights, register tokens, and what of it is trained."""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn

from regista.backbones.base import Backbone

PAPER = "registers,positions,patch_embed,attention:-1"
RELEASED = "registers,positions,patch_embed,block:-1"
RELEASED_CLIP = "registers,positions,patch_embed,block:-1,block:-2"
_BLOCK = re.compile(r"^(attention|block):(-?\d+)$")


def first_registers(count: int, embed_dim: int, seed: int) -> Tensor:
    """(R, D) from N(0, 1) / sqrt(D), as in the released code."""
    generator = torch.Generator().manual_seed(seed)
    registers: Tensor = torch.randn(count, embed_dim, generator=generator) * embed_dim**-0.5
    return registers


def make_student(teacher: Backbone, num_registers: int, seed: int) -> Backbone:
    """A copy of the teacher with random registers; with none it is the teacher to the bit."""
    student = teacher.with_registers(first_registers(num_registers, teacher.embed_dim, seed))
    student.planted = None
    return student


def parts_of(unfrozen: str, *, clip: bool) -> tuple[str, ...]:
    """The parts that a setting names: "paper", "released", or a list such as "registers,block:-1".

    Raises:
        ValueError: for a part that does not exist, with those that do.
    """
    presets = {"paper": PAPER, "released": RELEASED_CLIP if clip else RELEASED}
    parts = tuple(part.strip() for part in presets.get(unfrozen, unfrozen).split(","))
    known = ("registers", "positions", "patch_embed", "all")
    wrong = [part for part in parts if part not in known and not _BLOCK.match(part)]
    if wrong:
        raise ValueError(
            f"unfrozen: unknown {wrong}; 'paper', 'released', or a list of {', '.join(known)}, attention:N, block:N "
            "(N from 0, or from -1 at the end)"
        )
    return parts


def trained_parameters(student: Backbone, teacher: Backbone, parts: tuple[str, ...]) -> dict[str, nn.Parameter]:
    """{name in the module: parameter} of what is trained.

    Where inserting registers has folded the position of CLS into the CLS token, that token stands for
    its row of the position table and is trained with the positions.

    Raises:
        ValueError: if a part does not exist in this model, or nothing would be trained.
    """
    wanted: list[nn.Parameter] = []
    for part in parts:
        if part == "registers":
            table = student.register_table()
            wanted += [] if table is None else [table]
        elif part == "positions":
            wanted += _positions(student, teacher)
        elif part == "patch_embed":
            projection = student.patch_projection()
            wanted += [] if projection is None else list(projection.parameters())
        elif part == "all":
            wanted += list(student.module.parameters())
        else:
            wanted += _of_block(student, part)
    identities = {id(parameter) for parameter in wanted}
    found = {name: value for name, value in student.module.named_parameters() if id(value) in identities}
    if not found:
        raise ValueError(f"{student.name} has nothing of {', '.join(parts)}, so nothing would be trained")
    return found


def _positions(student: Backbone, teacher: Backbone) -> list[nn.Parameter]:
    table, before = student.position_table(), teacher.position_table()
    if table is None or before is None:
        return []
    cls: nn.Parameter | None = getattr(student.module, "cls_token", None)
    folded = cls is not None and table.shape[-2] < before.shape[-2]
    return [table, cls] if folded and cls is not None else [table]


def _of_block(student: Backbone, part: str) -> list[nn.Parameter]:
    match = _BLOCK.match(part)
    assert match is not None
    kind, index = match[1], int(match[2])
    sites = list(student.block_sites())
    if not -len(sites) <= index < len(sites):
        raise ValueError(f"unfrozen: {part!r}, but {student.name} has blocks 0 to {len(sites) - 1}")
    chosen = sites[index]
    return list((chosen.attn if kind == "attention" else chosen.block).parameters())
