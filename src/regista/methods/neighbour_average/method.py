"""Replace outlier tokens by the mean of their neighbours where they first appear."""

from __future__ import annotations

import copy
from typing import Any

from regista.backbones.base import Backbone
from regista.backbones.neighbour_repair import NeighbourRepair, NormRule
from regista.diagnosis.config import DiagnosisConfig
from regista.diagnosis.examination import diagnose
from regista.diagnosis.known_outliers import too_many
from regista.methods.neighbour_average.config import NeighbourAverageConfig
from regista.methods.protocol import Method, Progress, State, Workspace

NO_NORM = 1e30  # above that of any token


class NeighbourAverage(Method):
    """A baseline of our own: no training, no weights, one norm and one mean."""

    name = "neighbour_average"
    summary = "outlier tokens become the mean of their neighbours; no training"
    config_class = NeighbourAverageConfig

    def outline(self, backbone: Backbone) -> Backbone:
        """With a rule that replaces nothing."""
        block = self.config.block
        if block is not None and not 0 <= block < backbone.depth:
            raise ValueError(f"{backbone.name} has blocks 0 to {backbone.depth - 1}, got block={block}")
        return self.apply(backbone, State({"block": block or 0, "cutoff": NO_NORM}))

    def fit(
        self,
        backbone: Backbone,
        images: Any = None,
        *,
        progress: Progress | None = None,
        workspace: Workspace | None = None,
    ) -> State:
        """Find the block from which on there are outliers, and the norm that tells them there.

        Raises:
            ValueError: if the images show no outliers, or the model has no such block.
        """
        config: NeighbourAverageConfig = self.config
        self.outline(backbone)
        settings = DiagnosisConfig(batch_size=config.batch_size, cutoff=config.cutoff, attention=False)
        found = diagnose(backbone, images, config=settings)
        block = found.onset_block if config.block is None else config.block
        numbers = found.measures["high_norm"]
        cutoff = None if block is None else numbers["cutoff"][block]
        share = 0.0 if block is None else numbers["share"][block]
        if block is None or cutoff is None or not share:
            where = "in any block" if block is None else f"at block {block}"
            raise ValueError(
                f"{backbone.name} shows no outlier tokens {where} on these {found.images['count']} images, so there "
                "is nothing to repair; look with regista diagnose, or give a cutoff"
            )
        record = {"block": block, "cutoff": float(cutoff), "share": share, "images": found.images["count"]}
        return State(record, notes=too_many(share))

    def apply(self, backbone: Backbone, state: State) -> Backbone:
        """A copy that replaces them in every call."""
        repaired = copy.deepcopy(backbone)
        rule = NormRule(float(state.record["cutoff"]), self.config.kernel)
        repaired.add(NeighbourRepair(int(state.record["block"]), rule))
        return repaired


METHOD = NeighbourAverage
