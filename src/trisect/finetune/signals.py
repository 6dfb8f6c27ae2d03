"""Ctrl-C that waits for a safe place."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def stop_asked() -> Iterator[Callable[[], bool]]:
    """Yield a question: was Ctrl-C or a request to end heard? The second one has its usual effect."""
    heard: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False  # Python gives signals to the main thread only
        return
    usual = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def listen(number: int, frame: Any) -> None:
        heard.append(number)
        _restore(usual)

    for number in usual:
        signal.signal(number, listen)
    try:
        yield lambda: bool(heard)
    finally:
        _restore(usual)


def _restore(handlers: dict[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)
