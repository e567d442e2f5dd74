"""Is this model sick: artifacts in the patch tokens of a ViT."""

from __future__ import annotations

from regista.diagnosis.examination import diagnose
from regista.diagnosis.outliers import Outliers, find_outliers
from regista.diagnosis.record import Diagnosis

__all__ = ["Diagnosis", "Outliers", "diagnose", "find_outliers"]
