"""Uploads, against a client that only writes down what it is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import RepoUrl, constants

from regista.backbones.tiny import tiny_vit
from regista.export import hub
from regista.export.hub import push_to_hub
from regista.export.model_export import export_model

CALLS: list[tuple[str, dict[str, Any]]] = []


class FakeHub:
    """In the place of ``HfApi``; its methods take exactly the arguments of the real ones."""

    def __init__(self, **options: Any) -> None:
        CALLS.append(("HfApi", options))

    def create_repo(self, repo_id: str, **options: Any) -> RepoUrl:
        CALLS.append(("create_repo", {"repo_id": repo_id, **options}))
        return RepoUrl(f"https://huggingface.co/{repo_id}")

    def upload_folder(self, **options: Any) -> None:
        CALLS.append(("upload_folder", options))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    export_model(tiny_vit(depth=1), tmp_path / "out", card={"title": "T"})
    return tmp_path / "out"


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    CALLS.clear()
    monkeypatch.setattr(huggingface_hub, "HfApi", FakeHub)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "hub_answers", lambda endpoint: True)


@pytest.mark.usefixtures("online")
def test_the_calls(folder: Path) -> None:
    import inspect

    from huggingface_hub.hf_api import HfApi

    assert push_to_hub(folder, "me/vit", token="secret", message="First") == "https://huggingface.co/me/vit"
    assert [name for name, _ in CALLS] == ["HfApi", "create_repo", "upload_folder"]
    made, created, uploaded = (options for _, options in CALLS)
    assert made == {"token": "secret"}
    assert created == {"repo_id": "me/vit", "repo_type": "model", "private": True, "exist_ok": True}
    assert uploaded["folder_path"] == folder
    assert (uploaded["repo_id"], uploaded["repo_type"], uploaded["commit_message"]) == ("me/vit", "model", "First")
    for method, options in ((HfApi.create_repo, created), (HfApi.upload_folder, uploaded)):
        assert set(options) <= set(inspect.signature(method).parameters)  # the real client knows them all


@pytest.mark.usefixtures("online")
def test_public_only_when_asked(folder: Path) -> None:
    push_to_hub(folder, "me/vit", private=False)
    assert dict(CALLS)["create_repo"]["private"] is False
    assert dict(CALLS)["HfApi"] == {"token": None}


@pytest.mark.usefixtures("online")
def test_mistakes_are_named_before_anything_is_sent(folder: Path, tmp_path: Path) -> None:
    for name in ("vit", "me/vit/x", "me vit/x", ""):
        with pytest.raises(ValueError, match="wanted org/name"):
            push_to_hub(folder, name)
    with pytest.raises(ValueError, match="holds no exported model"):
        push_to_hub(tmp_path, "me/vit")
    assert not CALLS


@pytest.mark.usefixtures("online")
def test_what_the_hub_refuses_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("403 Forbidden:\n you may not write here")

    monkeypatch.setattr(FakeHub, "upload_folder", refuse)
    with pytest.raises(ValueError, match="me/vit: the upload failed: 403 Forbidden: you may not"):
        push_to_hub(folder, "me/vit")


def test_without_network(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="offline, by HF_HUB_OFFLINE"):  # as all tests run
        push_to_hub(folder, "me/vit")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "hub_answers", lambda endpoint: False)
    with pytest.raises(ValueError, match=r"no network.*nothing was uploaded"):
        push_to_hub(folder, "me/vit")
