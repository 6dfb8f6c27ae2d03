"""Errors of the libraries that load checkpoints, as errors of ours."""

from typing import Any

from trisect.errors import TrisectError


class explained:
    """Loading libraries raise many things for a damaged checkpoint; the user gets their first line."""

    def __init__(self, what: str):
        self.what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        # A panic of the tokenizers library is no Exception, but no more than a damaged file either.
        expected = isinstance(error, Exception) or type(error).__name__ == "PanicException"
        if error is None or isinstance(error, TrisectError) or not expected:
            return
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise TrisectError(f"{self.what}: {lines[0][:400]}") from error
