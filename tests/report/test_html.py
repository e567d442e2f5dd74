"""The page: its numbers, that it stands alone, and that it survives what a folder may hold."""

from __future__ import annotations

import base64
import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from regista.report.html import FILE, write_report
from regista.report.templating import code
from regista.results import RunFolder
from tests.report.page import Page
from tests.report.run_folders import FakeModel, make_run

HOSTILE = "<img src=x onerror=alert(1)>\"'&`</style></svg><script>alert(2)</script>.jpg"
ARRAYS = (
    "thumbnails",
    "norm_maps",
    "norm_maps_last",
    "outlier_masks",
    "attention_maps",
    "received_maps",
    "pca_maps",
    "score_maps",
    "position_frequency",
    "histogram_counts",
    "histogram_edges",
)


def page_of(run: Path) -> Page:
    path = write_report(run)
    assert path == run / FILE
    return Page(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def planted_page(planted_run: Path) -> Page:
    return page_of(planted_run)


@pytest.fixture(scope="module")
def register_page(register_run: Path) -> Page:
    return page_of(register_run)


def test_says_the_verdict_with_its_numbers(register_run: Path, register_page: Page) -> None:
    entry = json.loads((register_run / "run.json").read_text())["models"][0]
    high = entry["measures"]["high_norm"]
    text = register_page.text
    share, ratio = f"{100 * entry['share']:.1f} %", f"{high['ratio']:.1f}x"
    assert (
        f"Artifacts: {share} of patch tokens have outlier norms ({ratio} the median) from block 2 on; they move" in text
    )
    assert f"{entry['cutoff']:.0f}" in text
    assert f"{high['max'][-1]:.0f}" in text
    assert "9 x 12" in text
    assert "126 x 168 px" in text
    assert "1.60 of 2" in text  # effective registers
    assert "Only 3 images" in text
    assert "What this means" in text


def test_labels_planted_models(planted_page: Page) -> None:
    text = planted_page.text
    assert "1 clean, 1 with artifacts" in text
    assert "put into the weights on purpose" in text
    assert "precision" in text
    assert "98 % was found" in text
    tags = [attrs for _, attrs in planted_page.tags if "planted" in attrs.get("class", "").split()]
    assert len(tags) == 2  # in the table and above the verdict
    assert "Clean: none of the 3 kinds of artifact that were looked for was found in 3 images" in text
    assert "coffee: Rachel Michetti, CC0" in text


def test_loads_nothing(planted_page: Page, register_page: Page) -> None:
    for page in (planted_page, register_page):
        assert page.loads == []
        assert {"script", "iframe", "object", "embed", "base", "form"}.isdisjoint(tag for tag, _ in page.tags)
        assert all(attrs["src"].startswith("data:image/") for attrs in page.all("img"))
        policies = [
            attrs["content"] for attrs in page.all("meta") if attrs.get("http-equiv") == "Content-Security-Policy"
        ]
        assert policies == ["default-src 'none'; img-src data:; style-src 'unsafe-inline'"]


def test_finds_loads() -> None:
    for text in (
        "<img src='//a/b'>",
        "<link href=http://a>",
        "<style>a{b:url(https://c)}</style>",
        "<a href=javascript:x>",
    ):
        assert Page(text).loads
    assert Page("<img src='data:image/png;base64,//8='><a href='#x'>").loads == []


def test_elements_close(planted_page: Page, register_page: Page) -> None:
    for page in (planted_page, register_page):
        assert page.wrong == []
        assert page.open_tags == []
        names = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
        assert len(names) == len(set(names))
        missing = [attrs["href"] for attrs in page.all("a") + page.all("use") if attrs["href"][1:] not in names]
        assert missing == []
        assert all(attrs.get("alt") for attrs in page.all("img"))


def test_pictures_are_the_maps(register_run: Path, register_page: Page) -> None:
    arrays = RunFolder.open(register_run).read_arrays("arrays/00", ["pca_maps", "thumbnails"])
    pictures = {attrs["alt"]: attrs["src"] for attrs in register_page.all("img")}
    for index in range(3):
        shown = decoded(pictures[f"PCA colours of photos/image-{index}.jpg"])
        wanted = np.round(255 * arrays["pca_maps"][index].astype(float))
        rows, cols = wanted.shape[:2]
        factor = shown.shape[0] // rows
        assert shown.shape[:2] == (rows * factor, cols * factor)
        assert np.array_equal(shown, np.kron(wanted, np.ones((factor, factor, 1))))
        photo = decoded(pictures[f"photo photos/image-{index}.jpg"])
        assert np.abs(photo.astype(float) - arrays["thumbnails"][index]).mean() < 6  # JPEG
    assert "Attention: register 1 of photos/image-2.jpg" in " ".join(pictures)


def test_one_row_an_image_with_headings(register_page: Page) -> None:
    places = [
        register_page.text.index(word) for word in ("Patch norms bright", "Outliers where", "Attention: CLS bright")
    ]
    assert places == sorted(places)
    rows = [attrs for _, attrs in register_page.tags if attrs.get("class") == "row"]
    assert len(rows) == 3 + 3  # pictures and more maps


def test_same_folder_same_bytes(planted_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = write_report(planted_run).read_bytes()
    assert write_report(planted_run).read_bytes() == first
    monkeypatch.chdir(planted_run.parent)
    assert write_report(Path(planted_run.name)).read_bytes() == first


def test_page_names_no_folder_above_the_run(planted_run: Path) -> None:
    html = write_report(planted_run).read_text(encoding="utf-8")
    assert f"regista report {planted_run.parent.name}/demo" in html
    assert str(planted_run.parent.parent) not in html


def test_nothing_else_changes(planted_run: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in planted_run.rglob("*") if path.name != FILE}
    write_report(planted_run)
    assert {path: path.stat().st_mtime_ns for path in planted_run.rglob("*") if path.name != FILE} == before


def test_escapes_everything(tmp_path: Path) -> None:
    changes = {
        "library": HOSTILE,
        "kinds": ["high-norm", HOSTILE],
        "summary": [HOSTILE],
        "fixed_place": HOSTILE,
        "attention_queries": [HOSTILE],
        "attention_backend": HOSTILE,
        "images": {"skipped": [[HOSTILE, HOSTILE]], "note": HOSTILE, "names": [HOSTILE] * 3},
    }
    model = FakeModel(HOSTILE, outliers=5.0, planted=True, changes=changes)
    more = {"notes": [HOSTILE], "versions": {HOSTILE: HOSTILE}, "commit": HOSTILE, "command": [HOSTILE, HOSTILE]}
    page = page_of(make_run(tmp_path / "run", model, model, kind="checkpoints", **more))
    assert {"script"}.isdisjoint(tag for tag, _ in page.tags)
    assert not any(name.startswith("on") for _, attrs in page.tags for name in attrs)
    assert all(attrs["src"].startswith("data:image/") for attrs in page.all("img"))
    assert page.wrong == []
    assert page.open_tags == []
    assert page.text.count("<script>alert(2)</script>") > 10  # seen as text


def test_names_are_no_code(tmp_path: Path) -> None:
    odd = "$x_1^$ 100% {{ 7 * 7 }} {% if %} 模型 $"
    models = [FakeModel(f"run@{odd}{index}", outliers=5.0, names=[odd] * 3) for index in range(2)]
    text = page_of(make_run(tmp_path / "run", *models, kind="checkpoints")).text
    assert text.count(odd) > 8


def test_nothing_measured(tmp_path: Path) -> None:
    measures = dict.fromkeys(("high_norm", "attention_sink", "positional", "inconsistent", "lazy", "registers"))
    model = FakeModel(changes={"measures": measures, "depth": None, "grid_size": None})
    text = page_of(make_run(tmp_path / "run", model)).text
    assert "nothing was measured" in text
    assert "None" not in text
    assert "nan" not in text


@pytest.mark.parametrize("missing", ARRAYS)
def test_any_array_may_be_missing(tmp_path: Path, missing: str) -> None:
    without = ["histogram_counts", "histogram_edges"] if missing.startswith("histogram") else [missing]
    page = page_of(make_run(tmp_path / "run", FakeModel(outliers=5.0, without=without)))
    assert "None" not in page.text
    assert page.open_tags == []


def test_no_arrays_at_all(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "run", FakeModel(outliers=5.0, changes={"arrays": None})))
    assert page.all("img") == []
    assert "outlier norms" in page.text


@pytest.mark.parametrize("grid", [(1, 1), (1, 7), (40, 3)])
def test_odd_grids(tmp_path: Path, grid: tuple[int, int]) -> None:
    page = page_of(make_run(tmp_path / "run", FakeModel(grid=grid, images=1)))
    maps = [attrs for attrs in page.all("img") if "patch norms" in attrs["alt"]]
    shown = decoded(maps[0]["src"])
    assert shown.shape[0] * grid[1] == shown.shape[1] * grid[0]


def test_one_image_and_skipped_ones(tmp_path: Path) -> None:
    changes = {"fixed_place": None, "images": {"skipped": [["bad/empty.png", "the file is empty"]]}}
    text = page_of(make_run(tmp_path / "run", FakeModel(outliers=5.0, images=1, changes=changes))).text
    assert "One image only" in text
    assert "1 image could not be used: bad/empty.png (the file is empty)" in text
    assert "How often each place" not in text


def test_many_outliers_and_a_cutoff_by_hand(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", FakeModel(outliers=5.0, share=0.15))
    RunFolder.open(run).update(config={"cutoff": 80.0})
    text = page_of(run).text
    assert "more than a tenth" in text
    assert "set by hand" in text


def test_many_models_show_fewer_pictures(tmp_path: Path) -> None:
    models = [FakeModel(f"run@step-{index}.pth", outliers=5.0 if index > 2 else None) for index in range(5)]
    page = page_of(make_run(tmp_path / "run", *models, kind="checkpoints"))
    assert "5 checkpoints: 3 clean, 2 with artifacts" in page.text
    assert "Outliers first appear at step-3.pth." in page.text
    assert "Shown: 2 of 3 images" in page.text


def test_side_by_side_needs_the_same_images(tmp_path: Path, planted_page: Page) -> None:
    assert "The same images, side by side" in planted_page.text
    models = (FakeModel("a"), FakeModel("b", names=["x", "y", "z"]))
    assert "side by side" not in page_of(make_run(tmp_path / "run", *models)).text


def test_keeps_the_old_page_if_the_new_one_fails(planted_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(planted_run, tmp_path / "run")
    (run / FILE).write_text("old")
    (run / "arrays" / "01.safetensors").write_bytes(b"broken")
    with pytest.raises(ValueError, match=r"01\.safetensors"):
        write_report(run)
    assert (run / FILE).read_text() == "old"


def test_code_between_backticks() -> None:
    assert code("say `regista <x>` & go") == "say <code>regista &lt;x&gt;</code> &amp; go"


def decoded(uri: str) -> np.ndarray:
    """The pixels of a data URI: (height, width, 3)."""
    content = base64.b64decode(uri.partition("base64,")[2])
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
