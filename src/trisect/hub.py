"""Whether the Hugging Face hub can be reached, and libraries that give up in seconds where it cannot."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

CONNECT_SECONDS = 5.0
REMEMBERED_SECONDS = 60.0
_answered: dict[str, tuple[float, bool]] = {}
"""Endpoint -> when it was asked, and whether it answered: a run asks for many files in a row."""


@contextmanager
def short_patience(*, hub: bool = True) -> Iterator[None]:
    """Where the hub cannot be reached, look into its cache only, and do not try for half a minute.

    Nor try for ten minutes, as `datasets` does, to stream from a hub that closes connections. `hub` False:
    what is loaded does not come from there.
    """
    from huggingface_hub import constants

    datasets = sys.modules.get("datasets.config")  # whoever streams has imported it
    settings: list[tuple[Any, str, Any]] = []
    if datasets is not None:
        settings += [(datasets, f"STREAMING_{what}_MAX_RETRIES", 1) for what in ("READ", "OPEN")]
    if hub and not hub_answers():
        settings += [(module, "HF_HUB_OFFLINE", True) for module in (datasets, constants) if module]
    before = [getattr(module, name) for module, name, _ in settings]
    try:
        for module, name, value in settings:
            setattr(module, name, value)
        yield
    finally:
        for (module, name, _), value in zip(settings, before, strict=True):
            setattr(module, name, value)


def hub_answers() -> bool:
    """Whether the hub can be reached; its own libraries would try for half a minute."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    asked, answer = _answered.get(constants.ENDPOINT, (0.0, False))
    if not asked or time.monotonic() - asked > REMEMBERED_SECONDS:
        answer = _answers(constants.ENDPOINT)
        _answered[constants.ENDPOINT] = time.monotonic(), answer
    return answer


def _answers(endpoint: str) -> bool:
    """One request, through a proxy where one is set; whatever the hub says to it, it is there."""
    try:
        urlopen(Request(endpoint, method="HEAD"), timeout=CONNECT_SECONDS).close()
    except HTTPError as error:
        return error.code < 500  # a proxy that finds nothing behind it answers 502 to 504
    except (OSError, ValueError):
        return False
    return True
