"""Opens the run folder of a diagnosis for the report."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from regista.report.entry import ModelEntry, read_entry
from regista.results import RunFolder, RunRecord

KINDS = ("diagnosis", "comparison", "demo", "checkpoints")
SHAPES = {
    "thumbnails": 4,
    "norm_maps": 3,
    "norm_maps_last": 3,
    "outlier_masks": 3,
    "planted_masks": 3,
    "attention_maps": 4,
    "received_maps": 3,
    "pca_maps": 4,
    "consistency_maps": 3,
    "score_maps": 3,
    "position_frequency": 2,
    "histogram_counts": 2,
    "histogram_edges": 1,
}
NOT_PER_IMAGE = ("position_frequency", "histogram_counts", "histogram_edges")
NO_GRID = ("thumbnails", "histogram_counts", "histogram_edges")

ELSEWHERE = {
    "fix": "its numbers are in run.json and model/README.md; for a page run `regista compare MODEL {path}/model "
    "--images IMAGES`",
    "ablation": "its table is the .md file in the folder",
}


@dataclass(frozen=True)
class DiagnosisRun:
    """The run folder of a diagnosis.

    Attributes:
        folder: What lies on disk.
        record: Its record.
        entries: One a model.
    """

    folder: RunFolder
    record: RunRecord
    entries: tuple[ModelEntry, ...]

    @property
    def label(self) -> str:
        """The folder as a page names it: the last two parts of its path, wherever it is called from."""
        return "/".join(self.folder.path.resolve().parts[-2:]).lstrip("/")

    @property
    def command(self) -> str:
        """The command line that made it."""
        return shlex.join(str(word) for word in self.record.command)

    def arrays(self, entry: ModelEntry) -> dict[str, np.ndarray]:
        """Arrays of one model; those a diagnosis did not make are left out.

        Raises:
            ValueError: if they are missing, damaged or of unexpected shapes.
        """
        if not entry.arrays:
            return {}
        try:
            found = self.folder.read_arrays(entry.arrays)
        except ValueError as error:
            raise ValueError(f"{error}; make the run again with `regista diagnose`") from error
        known = {name: _plain(array) for name, array in found.items() if name in SHAPES}
        _check(known, f"{self.folder.path / entry.arrays}.safetensors")
        return known


def open_run(path: Path) -> DiagnosisRun:
    """The run in a folder.

    Raises:
        ValueError: if there is none, it is no diagnosis, or it holds no model.
    """
    try:
        folder = RunFolder.open(path)
    except ValueError as error:
        raise ValueError(f"{error}; give the folder that `regista diagnose` or `regista demo` wrote") from error
    record = folder.record
    if record.kind not in KINDS:
        raise ValueError(
            f"{path} is a run of kind {record.kind!r}; a report is made of {', '.join(KINDS)}: "
            + ELSEWHERE.get(record.kind, "run `regista diagnose` first").format(path=path)
        )
    if not record.models:
        raise ValueError(f"{path} holds no result: the run did not come to its end; run it again with --force")
    try:
        return DiagnosisRun(folder, record, tuple(read_entry(model) for model in record.models))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _plain(array: np.ndarray) -> np.ndarray:
    """Floats as float64, without NaN and infinity, which no picture can show."""
    if array.dtype.kind != "f":
        return array
    return np.nan_to_num(array.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)


def _check(arrays: dict[str, np.ndarray], path: str) -> None:
    """Shapes that go together; a wrong one would draw a wrong picture without a word."""
    wrong = [
        f"{name} has the shape {array.shape}, wanted {SHAPES[name]} dimensions"
        for name, array in arrays.items()
        if array.ndim != SHAPES[name] or not array.size
    ]
    wrong = wrong or _mismatches(arrays)
    if wrong:
        raise ValueError(f"{path}: {'; '.join(wrong)}; make the run again with `regista diagnose`")


def _mismatches(arrays: dict[str, np.ndarray]) -> list[str]:
    found = []
    maps = {name: array for name, array in arrays.items() if name not in NOT_PER_IMAGE}
    counts = {array.shape[0] for array in maps.values()}
    grids = {_grid(name, array) for name, array in arrays.items() if name not in NO_GRID}
    if len(counts) > 1:
        found.append(f"arrays of {sorted(counts)} images do not go together")
    if len(grids) > 1:
        found.append(f"maps of {sorted(grids)} cells do not go together")
    coloured = {name: arrays[name].shape[-1] for name in ("thumbnails", "pca_maps") if name in arrays}
    found += [f"{name} has {channels} channels, wanted 3" for name, channels in coloured.items() if channels != 3]
    if "thumbnails" in arrays and arrays["thumbnails"].dtype != np.uint8:
        found.append(f"thumbnails are {arrays['thumbnails'].dtype}, wanted uint8")
    bins, edges = arrays.get("histogram_counts"), arrays.get("histogram_edges")
    if (bins is None) != (edges is None) or (
        bins is not None and edges is not None and len(edges) != bins.shape[1] + 1
    ):
        found.append("the edges of the histogram do not fit its counts")
    return found


def _grid(name: str, array: np.ndarray) -> tuple[int, ...]:
    start = {"attention_maps": 2, "position_frequency": 0}.get(name, 1)
    return array.shape[start : start + 2]
