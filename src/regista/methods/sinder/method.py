"""Find tokens along a block's defect direction and replace them by what SINDER trains them towards."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regista.backbones.base import Backbone
from regista.backbones.neighbour_repair import DirectionRule, NeighbourRepair
from regista.diagnosis.config import DiagnosisConfig
from regista.diagnosis.source import ImageSource
from regista.methods.protocol import Method, Progress, State, Workspace
from regista.methods.sinder.config import SinderConfig
from regista.methods.sinder.directions import model_directions
from regista.tokens import TokenLayout

PRESENT = 0.5  # of the images that the worst block finds, for a block to be the first offending one


class Sinder(Method):
    """Singular defects repaired without training (after 2407.16826); see the card for what is left out."""

    name = "sinder"
    summary = "tokens along a direction that the weights alone give become smooth; no training"
    config_class = SinderConfig

    def outline(self, backbone: Backbone) -> Backbone:
        """With a direction that no token has."""
        block = self.config.block
        if block is not None and not 0 <= block < backbone.depth:
            raise ValueError(f"{backbone.name} has blocks 0 to {backbone.depth - 1}, got block={block}")
        return self.apply(backbone, State({"block": block or 0}, {"direction": torch.zeros(backbone.embed_dim)}))

    def fit(
        self,
        backbone: Backbone,
        images: Any = None,
        *,
        progress: Progress | None = None,
        workspace: Workspace | None = None,
    ) -> State:
        """Work out the directions, then find the first block whose output has defects.

        Raises:
            ValueError: if the images show none, and for models whose blocks cannot be made linear.
        """
        config: SinderConfig = self.config
        self.outline(backbone)
        directions = model_directions(backbone, num_samples=config.num_samples, seed=config.seed, inputs=config.inputs)
        rules = [self._rule(direction) for direction in directions.unbind(0)]
        cells, sick, count = defects(backbone, images, rules, config.batch_size, progress)
        block = first_offending(sick) if config.block is None else config.block
        if block is None or not sick[block]:
            where = "in any block" if block is None else f"at block {block}"
            raise ValueError(
                f"{backbone.name} shows no singular defects {where} on these {count} images, so there is nothing to "
                "repair; look with regista diagnose: outliers may lie on the border, or be fewer than min_tokens"
            )
        record = {"block": block, "images": count, "images_with_defects": sick, "defects": cells}
        return State(record, {"direction": directions.unbind(0)[block]})

    def apply(self, backbone: Backbone, state: State) -> Backbone:
        """A copy that replaces them in every call."""
        repaired = copy.deepcopy(backbone)
        rule = self._rule(state.tensors["direction"].to(backbone.dtype))
        repaired.add(NeighbourRepair(int(state.record["block"]), rule))
        return repaired

    def _rule(self, direction: Tensor) -> DirectionRule:
        config: SinderConfig = self.config
        return DirectionRule(
            direction,
            num_deviations=config.num_deviations,
            ignore_border=config.ignore_border,
            min_tokens=config.min_tokens,
            temperature=config.temperature,
        )


@torch.inference_mode()
def defects(
    backbone: Backbone, images: Any, rules: list[DirectionRule], batch_size: int, progress: Progress | None = None
) -> tuple[list[int], list[int], int]:
    """Per block the defects and the images that have some, and the number of images."""
    source = ImageSource(backbone, images, DiagnosisConfig(batch_size=batch_size))
    cells, sick, done = [0] * len(rules), [0] * len(rules), 0
    for pixels, valid in source:
        layout = backbone.layout((pixels.shape[-2], pixels.shape[-1]))
        sites = {f"blocks.{block}.resid": partial(_mask, rule, layout) for block, rule in enumerate(rules)}
        found = backbone(pixels, sites).captured
        for block in range(len(rules)):
            mask = found[f"blocks.{block}.resid"] & valid.to(backbone.device)
            cells[block] += int(mask.sum())
            sick[block] += int(mask.flatten(1).any(1).sum())
        done += len(pixels)
        if progress is not None:
            progress("defects", done, source.capacity)
    return cells, sick, done


def first_offending(sick: list[int]) -> int | None:
    """The first block that finds half as many images as the block that finds most; None if none finds any.

    Single images in an early block are chance: there the direction means little.
    """
    if not any(sick):
        return None
    return next(block for block, count in enumerate(sick) if count >= PRESENT * max(sick))


def _mask(rule: DirectionRule, layout: TokenLayout, tokens: Tensor) -> Tensor:
    """(B, N, D) -> (B, rows, cols) bool; nothing of images that are NaN or infinite, which the backbone reports."""
    tokens_map = layout.patch_map(tokens).permute(0, 2, 3, 1)  # (B, rows, cols, D)
    if not bool(tokens_map.isfinite().all()):
        return torch.zeros(tokens_map.shape[:3], dtype=torch.bool, device=tokens.device)
    return rule.mask(tokens_map)


METHOD = Sinder
