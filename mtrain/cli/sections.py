"""Help page of a verb with many options, in sections."""

from typing import Any

from typer.core import TyperCommand


class SectionedCommand(TyperCommand):
    """Command that lists options by their `rich_help_panel`, in plain lines; those without one come first."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes the sections of options for `--help`."""
        sections: dict[str, list[Any]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)  # None where it is hidden
            title = "Arguments" if parameter.param_type_name == "argument" else "Options"
            if record is not None:
                sections.setdefault(getattr(parameter, "rich_help_panel", None) or title, []).append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)
