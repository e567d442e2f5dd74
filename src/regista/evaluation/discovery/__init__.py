"""Single-object discovery: one box an image without labels, judged by CorLoc."""

from __future__ import annotations

from regista.evaluation.discovery.boxes import box_of, coarse_mask
from regista.evaluation.discovery.lost_seed import lost, lost_mask

__all__ = ["box_of", "coarse_mask", "lost", "lost_mask"]
