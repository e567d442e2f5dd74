"""Run folders as a comparison leaves them, made of random smooth maps: no model, no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from regista.results import RunFolder
from tests.report.run_folders import FakeModel, make_run

SICK = FakeModel("sick", outliers=6.0)
CURED = FakeModel("cured-model", registers=4)
SAME = FakeModel("same", outliers=6.0)


def compared(verdict: str, **changes: Any) -> dict[str, Any]:
    """What an entry holds under "comparison"."""
    likeness = {
        "former_outliers": {"mean": 0.1234, "p05": 0.0456, "cells": 40},
        "others": {"mean": 0.9876, "p05": 0.9011, "cells": 900},
    }
    return {
        "reference": verdict == "reference",
        "verdict": verdict,
        "sentence": f"outliers 3.0 % -> 0.0 % of {verdict}",
        "parameters": 22_053_504,
        "effective_registers": 3.217,
        "to_reference": None if verdict == "reference" else likeness,
        "to_denoised": {**likeness, "former_outliers": {"mean": 0.7654, "p05": 0.6543, "cells": 40}},
        "reason": "",
        "throughput": {
            "images_per_second": 41.23,
            "cost": 1.0345,
            "cost_range": [1.0123, 1.0567],
            "rounds": 5,
            "batch_size": 8,
        },
        "shared_pca": True,
        "norm_block": 5,
        **changes,
    }


def make_comparison(
    path: Path, *pairs: tuple[FakeModel, dict[str, Any]], kind: str = "comparison", **changes: Any
) -> Path:
    """Write a run folder of models, each with what the comparison says of it."""
    run = RunFolder.open(make_run(path, *(model for model, _ in pairs), kind=kind, **changes))
    models = json.loads(json.dumps(run.record.models))
    run.update(models=[{**entry, "comparison": own} for entry, (_, own) in zip(models, pairs, strict=True)])
    return run.path
