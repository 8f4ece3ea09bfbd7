"""The base class of every configuration section, and its rules."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Self, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from mtrain.config.schema.bounds import representable


class BrokenRulesError(ValueError):
    """Every broken rule of one section; pydantic itself would stop at the first."""

    def __init__(self, messages: tuple[str, ...]) -> None:
        super().__init__("\n".join(messages))
        self.messages = messages


class Section(BaseModel):
    """A frozen group of keys; refuses unknown keys and reports all broken rules together."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)
    asked_for: ClassVar[tuple[str, ...]] = ()
    """Keys to suggest when the section is missing, although another key may replace them."""

    @field_validator("*", mode="wrap")
    @classmethod
    def check_numbers(cls, value: object, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> object:
        """Refuses true and false as numbers, which pydantic would read as 1 and 0, and numbers out of range.

        One validator does both because each validator of a field costs start-up time.
        """
        annotation = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and {int, float} & {annotation, *get_args(annotation)}:
            raise ValueError(f"a number is needed, but {str(value).lower()} was given")
        return representable(handler(value))

    @model_validator(mode="after")
    def check_rules(self) -> Self:
        """Raises BrokenRulesError with a message for every broken rule."""
        if messages := tuple(self.broken_rules()):
            raise BrokenRulesError(messages)
        return self

    def broken_rules(self) -> Iterator[str]:
        """Yields a message for every broken rule of the section.

        A message starts with a key of the section and says what was given, what is needed and what to change.
        """
        yield from ()


def by_kind(where_absent: str) -> Discriminator:
    """Builds the discriminator of a union of sections by `kind`, with the default `where_absent`.

    A function, because pydantic refuses a discriminator field with validators, and all fields of a section have one.
    """

    def kind_of(value: object) -> str | None:
        if isinstance(value, Section):
            return str(getattr(value, "kind", None))
        return str(value.get("kind", where_absent)) if isinstance(value, Mapping) else None

    return Discriminator(kind_of)


AS_LIST, BY_NAME = "list", "mapping"
"""Tags of a field that holds a list of sections, or such lists by name; pydantic adds one to an error's location."""


def is_list_or_mapping(annotation: Any) -> bool:
    """Says whether a field holds a list of sections, or such lists by name."""
    forms = [form for form in get_args(annotation) if get_origin(form) is Annotated]
    return any(get_origin(get_args(form)[0]) is dict for form in forms)


def sections_in(annotation: Any) -> tuple[type[Section], ...]:
    """Returns the sections that a field's annotation allows: one per kind; empty for plain values."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return (annotation,)
    # without duplicates: an annotation may contain a section twice
    return tuple(dict.fromkeys(section for argument in get_args(annotation) for section in sections_in(argument)))
