from __future__ import annotations

from pathlib import Path

import pytest

from regista.cli import options
from regista.diagnosis.config import DiagnosisConfig


def test_settings_are_told_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a=b.png").touch()
    files, settings = options.split_settings(["photos", "a=b.png", "batch_size=4", "dir/x=y.png"])
    assert files == ["photos", "a=b.png", "dir/x=y.png"]
    assert settings == ["batch_size=4"]


def test_flags_win_over_settings_over_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("batch_size: 2\npolicy: crop\nconsistency: true\n")
    config = options.resolve(DiagnosisConfig, file, ["policy=pad", "batch_size=3"], {"batch_size": 4, "cutoff": None})
    assert config == DiagnosisConfig(batch_size=4, policy="pad", consistency=True)


@pytest.mark.parametrize("setting", ["batchsize=4", "batch_size=many", "policy=squash", "image_size=3"])
def test_wrong_settings_name_the_key(setting: str) -> None:
    with pytest.raises(ValueError, match=setting.split("=", maxsplit=1)[0]):
        options.resolve(DiagnosisConfig, None, [setting], {})


@pytest.mark.parametrize("text", ["a: [", "- 1\n- 2\n", "unknown_key: 1\n"])
def test_wrong_settings_files_are_one_error(tmp_path: Path, text: str) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match="settings"):
        options.resolve(DiagnosisConfig, file, [], {})


def test_new_folders_are_numbered(tmp_path: Path) -> None:
    assert options.new_folder("diagnose", tmp_path).name == "diagnose-001"
    (tmp_path / "diagnose-009").mkdir()
    (tmp_path / "diagnose-x").mkdir()
    assert options.new_folder("diagnose", tmp_path).name == "diagnose-010"
