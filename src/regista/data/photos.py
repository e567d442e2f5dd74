"""Real photos that ship inside installed packages: pictures to try things on, without a download."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from PIL import Image

from regista.data.reading import load_image


@dataclass(frozen=True)
class Photo:
    """A photo on this machine.

    Attributes:
        name: Short and unique.
        credit: Whose it is, the licence, and the package it comes in.
        path: The file.
    """

    name: str
    credit: str
    path: Path

    def load(self) -> Image.Image:
        """The photo as an RGB image."""
        return load_image(self.path)


_SKIMAGE, _SKLEARN, _MATPLOTLIB = "scikit-image", "scikit-learn", "matplotlib"
_FOLDERS = {
    _SKIMAGE: ("skimage", "data"),
    _SKLEARN: ("sklearn", "datasets/images"),
    _MATPLOTLIB: ("matplotlib", "mpl-data/sample_data"),
}
# (name, distribution, file, credit), colour photos of everyday things first
_PHOTOS = (
    ("chelsea", _SKIMAGE, "chelsea.png", "Stefan van der Walt, CC0"),
    ("coffee", _SKIMAGE, "coffee.png", "Rachel Michetti, courtesy of Pikolo Espresso Bar, CC0"),
    ("astronaut", _SKIMAGE, "astronaut.png", "NASA, public domain"),
    ("china", _SKLEARN, "china.jpg", "danielbuechele, CC BY 2.0"),
    ("flower", _SKLEARN, "flower.jpg", "vultilion, CC BY 2.0"),
    ("rocket", _SKIMAGE, "rocket.jpg", "SpaceX, public domain"),
    ("grace_hopper", _MATPLOTLIB, "grace_hopper.jpg", "James S. Davis, US Navy, public domain"),
    ("motorcycle", _SKIMAGE, "motorcycle_left.png", "Middlebury stereo benchmark 2014, D. Scharstein et al."),
    ("camera", _SKIMAGE, "camera.png", "Lav Varshney, CC0"),
    ("coins", _SKIMAGE, "coins.png", "Brooklyn Museum, no known copyright restrictions"),
    ("clock", _SKIMAGE, "clock_motion.png", "Stefan van der Walt, public domain"),
    ("ihc", _SKIMAGE, "ihc.png", "Center for Microscopy and Molecular Imaging, no known copyright restrictions"),
    ("retina", _SKIMAGE, "retina.jpg", "Mikael Häggström, CC0"),
    ("hubble_deep_field", _SKIMAGE, "hubble_deep_field.jpg", "NASA, public domain"),
)


def installed_photos(limit: int | None = None) -> list[Photo]:
    """Photos that lie in installed packages, always in the same order.

    Nothing is downloaded and no package is imported; a photo whose file is not there is left
    out. scikit-image, which has most of them, comes with the extra ``[demo]``.

    Args:
        limit: The most to return; all by default.
    """
    found = []
    for name, distribution, file, credit in _PHOTOS:
        folder = _folder(*_FOLDERS[distribution])
        if folder is not None and (folder / file).is_file():
            found.append(Photo(name, f"{credit} (in {distribution})", folder / file))
    return found[:limit]


def _folder(package: str, inside: str) -> Path | None:
    """A folder of an installed package, without importing it."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]) / inside
