"""Is this model sick: artifacts in the patch tokens of a ViT; and did a cure help."""

from __future__ import annotations

from regista.diagnosis.comparison import compare
from regista.diagnosis.comparison_record import Comparison
from regista.diagnosis.examination import diagnose
from regista.diagnosis.outliers import Outliers, find_outliers
from regista.diagnosis.record import Diagnosis

__all__ = ["Comparison", "Diagnosis", "Outliers", "compare", "diagnose", "find_outliers"]
