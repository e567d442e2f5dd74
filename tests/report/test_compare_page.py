"""The page of a comparison: verdicts, numbers and pictures of the same images."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from regista.report.compare_entry import read_compared
from regista.report.compare_pictures import compared_norms
from regista.report.html import write_report
from regista.report.reading import open_run
from regista.results import RunFolder
from tests.report.compared_runs import CURED, SAME, SICK, compared, make_comparison
from tests.report.page import Page
from tests.report.run_folders import FakeModel, make_run

HOSTILE = "<script>alert(1)</script>\"'&"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pairs = (SICK, compared("reference")), (CURED, compared("cured")), (SAME, compared("no gain"))
    return make_comparison(tmp_path_factory.mktemp("runs") / "three", *pairs, notes=["They differ in size."])


@pytest.fixture(scope="module")
def page(run: Path) -> Page:
    return page_of(run)


def page_of(run: Path) -> Page:
    return Page(write_report(run).read_text(encoding="utf-8"))


def test_verdicts_come_first(page: Page) -> None:
    assert "2 models against sick: 1 cured, 1 no gain" in page.text
    said = page.text.index("outliers 3.0 % → 0.0 % of cured")
    assert said < page.text.index("The numbers") < page.text.index("The same images in every model")
    for word in ("Reference", "Cured", "No gain"):
        assert word in page.parts
    assert [attrs.get("class") for attrs in page.all("li")][:3] == ["", "good", ""]


def test_numbers_are_those_of_the_record(page: Page) -> None:
    for number in ("0.123", "5 %: 0.046", "0.988", "5 %: 0.901", "0.765", "22.1 M", "41.2", "1.03x", "1.01x to 1.06x"):
        assert number in page.parts, number
    assert "3.22 in use" in page.text
    assert "They differ in size." in page.text
    assert "Only 3 images" in page.text


def test_stands_alone(page: Page) -> None:
    assert page.loads == page.wrong == page.open_tags == []
    assert "None" not in page.text
    policy = [attrs["content"] for attrs in page.all("meta") if "default-src" in attrs.get("content", "")]
    assert policy == ["default-src 'none'; img-src data:; style-src 'unsafe-inline'"]


def test_same_folder_same_bytes(run: Path) -> None:
    assert write_report(run).read_bytes() == write_report(run).read_bytes()


def test_pictures_of_every_model_on_every_image(run: Path, page: Page) -> None:
    pictures = page.all("img")
    # per image: a photo, and for each of three models norms, outliers, colours and attention
    assert len(pictures) == 3 * (1 + 3 * 4)
    assert [attrs["alt"].split(":")[0] for attrs in pictures[1:13:4]] == [
        "patch norms of sick",
        "patch norms of cured-model",
        "patch norms of same",
    ]
    colours = [attrs for attrs in pictures if attrs["alt"].startswith("PCA colours")]
    data = io.BytesIO(base64.b64decode(colours[1]["src"].partition(",")[2]))
    shown = np.asarray(Image.open(data))
    wanted = RunFolder.open(run).read_arrays("arrays/01")["pca_maps"][0]
    factor = shown.shape[0] // wanted.shape[0]
    np.testing.assert_array_equal(shown[::factor, ::factor], np.round(255 * np.clip(wanted, 0, 1)))


def test_norms_share_one_scale_at_the_compared_block(run: Path) -> None:
    opened = open_run(run)
    models = read_compared(opened.record.models)
    arrays = [opened.arrays(model.entry) for model in models]
    for model, own, relative in zip(models, arrays, compared_norms(models, arrays), strict=True):
        median = model.entry.curves.median[5]
        assert median is not None
        np.testing.assert_allclose(relative, own["norm_maps"] / median)


def test_models_that_are_unlike(tmp_path: Path) -> None:
    other = compared("fewer artifacts", reason="its features have 64 channels", to_reference=None, to_denoised=None)
    pairs = (SICK, compared("reference", to_denoised=None)), (CURED, {**other, "shared_pca": False, "throughput": None})
    page = page_of(make_comparison(tmp_path / "run", *pairs))
    assert "Against sick: fewer artifacts" in page.text
    assert "Features of cured-model were not compared: its features have 64 channels." in page.text
    assert "Each model has colours of its own" in page.text
    assert "Nothing was compared with denoised features" in page.text
    assert [attrs.get("class") for attrs in page.all("li")][:2] == ["", ""]  # no praise for an unlike model


def test_missing_maps_and_unlike_images(tmp_path: Path) -> None:
    without = FakeModel("blind", without=["attention_maps"])
    page = page_of(make_comparison(tmp_path / "a", (SICK, compared("reference")), (without, compared("cured"))))
    assert page.parts.count("not measured") == 3
    nothing = FakeModel("nothing", without=["norm_maps"])
    other = FakeModel("other", names=["x.jpg", "y.jpg", "z.jpg"])
    for index, model in enumerate((nothing, other)):
        pairs = (SICK, compared("reference")), (model, compared("cured"))
        page = page_of(make_comparison(tmp_path / f"b{index}", *pairs))
        assert page.all("img") == []
        assert "The numbers" in page.text


def test_escapes_everything(tmp_path: Path) -> None:
    names = [HOSTILE, "b", "c"]
    hostile = compared(HOSTILE, sentence=HOSTILE, reason=HOSTILE)
    pairs = (FakeModel(HOSTILE, names=names), compared("reference")), (FakeModel("b", names=names), hostile)
    page = page_of(make_comparison(tmp_path / "run", *pairs, notes=[HOSTILE]))
    assert page.all("script") == []
    assert page.loads == page.wrong == page.open_tags == []


def test_folders_that_are_no_comparison(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", SICK, CURED, kind="comparison")
    with pytest.raises(ValueError, match=r"sick has no comparison.*regista compare"):
        write_report(path)


def test_many_models_show_fewer_images(tmp_path: Path) -> None:
    pairs = [(FakeModel(f"m{index}", images=8), compared("no gain")) for index in range(6)]
    page = page_of(make_comparison(tmp_path / "run", (FakeModel("first", images=8), compared("reference")), *pairs))
    assert len([attrs for attrs in page.all("img") if attrs["alt"].startswith("photo")]) == 2
    assert "Shown: 2 of 8 images" in page.text
