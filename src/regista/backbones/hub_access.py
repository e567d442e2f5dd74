"""Calls that may fetch from the Hugging Face hub: quick to fail without network, and one error for all of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

TIMEOUT = 5.0
MESSAGE = 300  # characters of a library's own message


@contextmanager
def reaching_hub(what: str, instead: str = "", *, local: bool = False) -> Iterator[None]:
    """Turn every failure of a library's download into one ``ValueError``.

    The hub's client retries for half a minute a file. So the hub is asked once whether it answers,
    and if not, the client is put in its offline mode for as long as the context is open: what is
    cached loads at once, and what is not fails at once.

    Args:
        what: The spec that is loaded, for the message.
        instead: What else the user can do.
        local: What is loaded lies in a folder, so the hub is not asked at all.

    Raises:
        ValueError: whatever goes wrong inside.
    """
    from huggingface_hub import constants

    before, silenced = constants.HF_HUB_OFFLINE, logging.root.manager.disable
    offline = local or before or not hub_answers(constants.ENDPOINT)
    constants.HF_HUB_OFFLINE = offline
    logging.disable(max(silenced, logging.ERROR))  # libraries log the failure that is raised here
    try:
        yield
    except Exception as error:
        text = " ".join(str(error).split()) or type(error).__name__
        unreachable = isinstance(error, (OSError, RuntimeError)) and "state_dict" not in text
        if offline and not local and unreachable:
            reason = "offline, by HF_HUB_OFFLINE" if before else "no network"
            raise ValueError(
                f"{what} is not in the local cache and cannot be fetched ({reason}); load it once with a network, or "
                f"copy the cache{instead}"
            ) from error
        raise ValueError(f"{what} cannot be loaded: {text[:MESSAGE]}{instead}") from error
    finally:
        logging.disable(silenced)
        constants.HF_HUB_OFFLINE = before


def hub_answers(endpoint: str) -> bool:
    """Whether the hub can be reached, asked once, within a few seconds."""
    from huggingface_hub import get_session

    try:
        get_session().head(endpoint, timeout=TIMEOUT)
    except Exception:  # of httpx or requests, whichever the client is built on
        return False
    return True
