"""Uploading an exported folder to the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from regista.backbones.hub_access import hub_answers

MODEL_FILES = ("config.json", "model.onnx")
REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
HIDDEN = [".*", "**/.*"]


def push_to_hub(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool = True,
    token: str | None = None,
    message: str = "Upload model",
) -> str:
    """Upload a folder that ``export_model`` wrote; the repository is made if it is not there.

    Args:
        repo_id: "org/name".
        private: For a new repository; that of an existing one stays as it is.
        token: With the right to write; by default the one that ``hf auth login`` stored.

    Returns:
        The address of the repository.

    Raises:
        ValueError: for a folder without a model, a name that is none, without network, and when the hub refuses.
    """
    from huggingface_hub import HfApi, constants

    folder = Path(folder).expanduser()
    if not any((folder / name).is_file() for name in MODEL_FILES):
        raise ValueError(f"{folder} holds no exported model ({' or '.join(MODEL_FILES)}); export one first")
    if not REPOSITORY.fullmatch(repo_id):
        raise ValueError(f"{repo_id!r} is not the name of a repository; wanted org/name")
    if constants.HF_HUB_OFFLINE or not hub_answers(constants.ENDPOINT):
        reason = "offline, by HF_HUB_OFFLINE" if constants.HF_HUB_OFFLINE else "no network"
        raise ValueError(f"{repo_id} cannot be reached ({reason}); nothing was uploaded, {folder} is as it was")
    api = HfApi(token=token)
    try:
        created = api.create_repo(repo_id, repo_type="model", private=private, exist_ok=True)
        api.upload_folder(
            repo_id=created.repo_id,
            repo_type="model",
            folder_path=folder,
            commit_message=message,
            ignore_patterns=HIDDEN,
        )
    except Exception as error:  # of the hub's client, of httpx and of the file system
        text = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{repo_id}: the upload failed: {text[:300]}") from error
    return str(created)
