"""Photos of installed packages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from regista.data import photos
from regista.data.photos import installed_photos


def test_they_are_photos_with_credit() -> None:
    found = installed_photos()
    assert {"china", "flower", "grace_hopper"} <= {photo.name for photo in found}  # of core dependencies
    assert len({photo.name for photo in found}) == len(found)
    for photo in found:
        image = photo.load()
        assert image.mode == "RGB"
        assert min(image.size) >= 224
        assert np.asarray(image).std() > 10
        assert photo.credit.endswith(")")
        assert len(photo.credit) > 15


def test_limit_and_order() -> None:
    assert installed_photos(limit=2) == installed_photos()[:2]
    assert installed_photos() == installed_photos()
    assert installed_photos(limit=0) == []


def test_what_is_not_there_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = photos.find_spec
    monkeypatch.setattr(photos, "find_spec", lambda name: None if name == "skimage" else real(name))
    names = [photo.name for photo in installed_photos()]
    assert names == ["china", "flower", "grace_hopper"]
    monkeypatch.setattr(photos, "_FOLDERS", dict.fromkeys(photos._FOLDERS, ("sklearn", "no/such/folder")))
    assert installed_photos() == []


def test_no_package_is_imported() -> None:
    code = "import sys; from regista.data.photos import installed_photos; installed_photos()"
    code += "; print([name for name in ('skimage', 'sklearn', 'matplotlib', 'pooch', 'torch') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_same_as_scikit_learn_gives() -> None:
    from sklearn.datasets import load_sample_image

    by_name = {photo.name: photo for photo in installed_photos()}
    for name in ("china", "flower"):
        assert np.array_equal(np.asarray(by_name[name].load()), load_sample_image(f"{name}.jpg"))
