"""Records that pydantic checks and the command line derives its options from: a setting is written once."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar, dataclass_transform

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from trisect.errors import TrisectError, unknown_name

GOAL, CUT, CALIBRATION, RUNNING = "Goal", "How to cut", "Calibration", "Running"
"""Panels of the command line's help."""

T = TypeVar("T")


def option(
    *,
    default: Any,
    help: str,
    panel: str | None = CUT,
    metavar: str | None = None,
    choices: tuple[str, ...] = (),
    typed: Any = None,
    **checks: Any,
) -> Any:
    """A setting: its default, its help, and how it is typed.

    `choices` are all values there are; `typed` is the type on the command line where that is not the setting's
    own; `checks` are pydantic's (ge, le, ...).
    """
    about = {"panel": panel, "metavar": metavar or "|".join(choices) or None, "choices": choices, "typed": typed}
    chosen = {"default_factory": default} if isinstance(default, type) else {"default": default}
    return Field(description=help, json_schema_extra=about, **chosen, **checks)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(option, Field))
def record(cls: type[T]) -> type[T]:
    """A frozen dataclass with keyword arguments, whose bad values are refused by name with a TrisectError."""
    made: Any = dataclass(frozen=True, kw_only=True, config=ConfigDict(strict=True, extra="forbid"))(cls)
    init: Callable[..., None] = made.__init__

    def checked_init(self: Any, **given: Any) -> None:
        try:
            init(self, **given)
        except ValidationError as error:
            raise refusal(made, error) from None

    made.__init__ = checked_init
    return made


def refusal(cls: type, error: ValidationError) -> TrisectError:
    """The first thing that pydantic found, in our words."""
    first = error.errors()[0]
    raised = first.get("ctx", {}).get("error")
    if isinstance(raised, TrisectError):
        return raised
    name = str(first["loc"][0]) if first["loc"] else cls.__name__
    if first["type"] == "unexpected_keyword_argument":
        return unknown_name(f"{cls.__name__} setting", name, setting_names(cls))
    if first["type"] == "bool_type":
        return TrisectError(f"{name} is true or false, not {first['input']!r}.")
    return TrisectError(f"{name} must be {first['msg'].removeprefix('Input should be ')}, not {first['input']!r}.")


def check_choices(self: Any) -> None:
    """Refuse a value that is none of its setting's choices."""
    for name, about in options_of_record(type(self)).items():
        value = getattr(self, name)
        if about["choices"] and value is not None and value not in about["choices"]:
            raise unknown_name(name.replace("_", " "), str(value), about["choices"])


def options_of_record(cls: type) -> dict[str, Mapping[str, Any]]:
    """Settings by name, with their help, default and how they are typed."""
    declared: Any = cls.__pydantic_fields__  # type: ignore[attr-defined]
    return {
        name: {**entry.json_schema_extra, "help": entry.description, "annotation": entry.annotation}
        for name, entry in declared.items()
        if entry.json_schema_extra
    }


def setting_names(cls: type) -> list[str]:
    """The settings of a record."""
    return [entry.name for entry in fields(cls)]


def defaults_of(cls: type) -> dict[str, Any]:
    """Settings and their defaults."""
    declared: Any = cls.__pydantic_fields__  # type: ignore[attr-defined]
    return {name: entry.get_default(call_default_factory=True) for name, entry in declared.items()}
