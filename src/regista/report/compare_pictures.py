"""Pictures of a comparison: image by image, one row a model, colours that mean the same in every row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from regista.report.columns import attention, outliers, pca
from regista.report.compare_entry import ComparedEntry
from regista.report.formatting import file_name, times
from regista.report.gallery import Arrays, Cell, Column, Legend, colour_bar, image_name, map_cell
from regista.report.maps import Scale, norm_scale, photo_uri


@dataclass(frozen=True)
class ModelRow:
    """The pictures of one model on one image; None where there is none."""

    model: ComparedEntry
    cells: list[Cell | None]


@dataclass(frozen=True)
class ImageBlock:
    """One image: its photo and a row for each model."""

    name: str
    photo: Cell
    rows: list[ModelRow]


@dataclass(frozen=True)
class ComparedPictures:
    """Blocks of images, the headings of their columns as (heading, brief), and how to read them."""

    headings: list[tuple[str, str]]
    blocks: list[ImageBlock]
    legends: list[Legend]


def compared_pictures(models: Sequence[ComparedEntry], arrays: Sequence[Arrays], most: int) -> ComparedPictures | None:
    """Photo, and for each model patch norms, outliers, PCA colours and attention.

    Args:
        models: The reference first.
        arrays: Of each model.
        most: Images at most.

    Returns:
        None if maps are missing or the models' pictured images differ.
    """
    if len({model.entry.image_names for model in models}) != 1:
        return None
    if any("thumbnails" not in found or "norm_maps" not in found for found in arrays):
        return None
    rows = min(most, *(len(found["norm_maps"]) for found in arrays))
    scale, columns = _columns(models, arrays, rows)
    shown = [position for position in range(len(columns[0])) if any(own[position] is not None for own in columns)]
    kinds = [next(own[position] for own in columns if own[position] is not None) for position in shown]
    blocks = []
    for index in range(rows):
        name = file_name(image_name(models[0].entry, index))
        photo = Cell(photo_uri(arrays[0]["thumbnails"][index]), f"photo {name}", name)
        cells = [[_cell(own[position], index) for position in shown] for own in columns]
        blocks.append(ImageBlock(name, photo, [ModelRow(*row) for row in zip(models, cells, strict=True)]))
    headings = [(kind.heading, kind.brief) for kind in kinds if kind is not None]
    return ComparedPictures(headings, blocks, _legends(models, scale, [heading for heading, _ in headings]))


def compared_norms(models: Sequence[ComparedEntry], arrays: Sequence[Arrays]) -> list[np.ndarray]:
    """Norm maps (k, rows, cols) of each model over its own median at the pictured block."""
    found = []
    for model, own in zip(models, arrays, strict=True):
        block, curve = model.norm_block, model.entry.curves.median
        recorded = curve[block] if block is not None and block < len(curve) else None
        median = recorded or float(np.median(own["norm_maps"])) or 1.0
        found.append(own["norm_maps"] / median)
    return found


def _columns(
    models: Sequence[ComparedEntry], arrays: Sequence[Arrays], rows: int
) -> tuple[Scale, list[list[Column | None]]]:
    relative = compared_norms(models, arrays)
    scale = norm_scale(np.concatenate([values[:rows].ravel() for values in relative]), 1.0)
    columns: list[list[Column | None]] = []
    for model, own, values in zip(models, arrays, relative, strict=True):
        plain = {name: array for name, array in own.items() if name != "planted_masks"}
        columns.append(
            [
                _norms(model, plain, values, scale, rows),
                outliers(model.entry, plain, rows),
                pca(model.entry, plain, rows),
                next(iter(attention(model.entry, plain, rows)), None),
            ]
        )
    return scale, columns


def _norms(model: ComparedEntry, arrays: Arrays, relative: np.ndarray, scale: Scale, rows: int) -> Column:
    masks = arrays.get("outlier_masks")
    cells = []
    for index in range(rows):
        note = f"max {times(float(relative[index].max()))} median"
        mask = None if masks is None else masks[index]
        cells.append(map_cell(relative[index], scale, f"patch norms of {model.entry.model}", note, mask))
    return Column("Patch norms", "", cells, brief="bright squares are artifacts")


def _cell(column: Column | None, index: int) -> Cell | None:
    return None if column is None or index >= len(column.cells) else column.cells[index]


def _legends(models: Sequence[ComparedEntry], scale: Scale, headings: Sequence[str]) -> list[Legend]:
    blocks = sorted({model.norm_block for model in models if model.norm_block is not None})
    where = f" after block {blocks[0]}" if len(blocks) == 1 else ""
    words = {
        "Patch norms": f"Length of each patch token{where}, before the final norm, as a multiple of the model's own "
        "median; one scale for all models and images. Healthy: an even tone. Artifacts: single bright squares.",
        "Outliers": "Where the outlier tokens sit on the picture: red squares.",
        "Features (PCA)": "Three main directions of the final patch features as red, green and blue. Equal colours are "
        "alike to the model. Artifacts: odd specks." + _whose_colours(models),
    }
    legends = []
    for heading in headings:
        bar = colour_bar(scale, "norm / median", [(1.0, "median")]) if heading == "Patch norms" else None
        caption = words.get(
            heading, "Attention over the patches, last block, mean over heads; each map from 0 to its own maximum."
        )
        legends.append(Legend(heading, caption, bar))
    return legends


def _whose_colours(models: Sequence[ComparedEntry]) -> str:
    own = [model.entry.model for model in models if not model.shared_pca]
    if not own:
        return " The colours are fitted on the reference and mean the same in every row."
    if len(own) >= len(models) - 1:
        return " Each model has colours of its own: their features are too different for common ones."
    return f" The colours are those of the reference, but for {', '.join(own)}: too different, so with its own colours."
