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

from mtrain.config.schema.bounds import fits_the_machine


class BrokenRulesError(ValueError):
    """Every broken rule of one section; pydantic itself would stop at the first."""

    def __init__(self, messages: tuple[str, ...]) -> None:
        super().__init__("\n".join(messages))
        self.messages = messages


class Section(BaseModel):
    """A frozen group of keys; refuses unknown keys and reports all broken rules together."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)
    asked_for: ClassVar[tuple[str, ...]] = ()
    """Keys that a message asks for if the section is missing, though another key may replace them."""

    @field_validator("*", mode="wrap")
    @classmethod
    def numbers_are_numbers_and_fit_the_machine(
        cls, value: object, handler: ValidatorFunctionWrapHandler, info: ValidationInfo
    ) -> object:
        """Refuses `layout.tp=yes`, which pydantic would read as 1, and numbers that a run cannot represent.

        One validator does both, because each validator of a field costs start-up time.
        """
        annotation = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and {int, float} & {annotation, *get_args(annotation)}:
            raise ValueError(f"a number is needed, but {str(value).lower()} was given")
        return fits_the_machine(handler(value))

    @model_validator(mode="after")
    def every_rule_is_kept(self) -> Self:
        """Raises BrokenRulesError with the message of every broken rule."""
        if messages := tuple(self.broken_rules()):
            raise BrokenRulesError(messages)
        return self

    def broken_rules(self) -> Iterator[str]:
        """Yields a message for every broken rule of the section.

        It starts with a key of the section and says what was given, what is needed and what to change.
        """
        yield from ()


def by_kind(where_absent: str) -> Discriminator:
    """Builds the choice in a union of sections by `kind`, by default `where_absent`.

    A function, because pydantic does not choose by a field with validators, which all fields of a section have.
    """

    def kind_of(value: object) -> str | None:
        if isinstance(value, Section):
            return str(getattr(value, "kind", None))
        return str(value.get("kind", where_absent)) if isinstance(value, Mapping) else None

    return Discriminator(kind_of)


AS_LIST, BY_NAME = "list", "mapping"
"""Tags of a field with a list of sections, or such lists by name: pydantic puts one after the field's name."""


def is_list_or_mapping(annotation: Any) -> bool:
    """Says whether a field of sections has the two forms."""
    return any(get_origin(each) is Annotated and get_origin(get_args(each)[0]) is dict for each in get_args(annotation))


def sections_in(annotation: Any) -> tuple[type[Section], ...]:
    """Returns the sections that a field's annotation allows: one per kind; empty for plain values."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return (annotation,)
    # each once, though a field may allow it in two places
    return tuple(dict.fromkeys(found for argument in get_args(annotation) for found in sections_in(argument)))
