"""What goes wrong with a model on the Hugging Face hub, in one line that says what to do."""

from collections.abc import Iterator
from contextlib import contextmanager

from trisect.errors import TrisectError
from trisect.hub import hub_answers, short_patience
from trisect.models.source import Source

LOCAL = "a folder or a .gguf file works too"


@contextmanager
def from_hub(source: Source) -> Iterator[None]:
    """Around whatever loads a model: errors of the hub's libraries become one line, and come soon."""
    if source.local:
        yield
        return
    try:
        with short_patience():
            yield
    except TrisectError as error:
        advice = _advice(source.path, error)
        if advice is None:
            raise
        raise TrisectError(advice) from error


def _advice(name: str, error: BaseException) -> str | None:
    """By what lies behind an error; None where that has nothing to do with the hub."""
    behind = {kind.__name__ for cause in _causes(error) for kind in type(cause).__mro__}
    if "GatedRepoError" in behind:
        return f"{name} is gated: ask for access on its page of the hub, then type `hf auth login`; {LOCAL}."
    if "RepositoryNotFoundError" in behind:
        return f"The hub has no model {name}, or it is private: check the id, or `hf auth login`; {LOCAL}."
    if not hub_answers():
        return f"The Hugging Face hub cannot be reached, and its cache has not all of {name}; {LOCAL}."
    if "TransportError" in behind:
        return f"The download of {name} broke off: type the same again, and it goes on from there; {LOCAL}."
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
