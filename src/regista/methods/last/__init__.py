"""LAST (arXiv 2602.22394): selective pooling of the patches as a read-out, without training."""

from __future__ import annotations

from regista.layers.selective_pool import PooledVotes, SelectivePool, patch_scores
from regista.methods.last.method import patch_votes

__all__ = ["PooledVotes", "SelectivePool", "patch_scores", "patch_votes"]
