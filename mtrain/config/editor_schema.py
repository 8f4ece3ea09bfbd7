"""JSON schema of configurations for editors, which complete and explain keys by it."""

from typing import Any

from mtrain.config.keys import texts_of
from mtrain.config.schema.root import Config
from mtrain.config.schema.section import Section, sections_in


def editor_schema() -> dict[str, Any]:
    """Returns the schema of one YAML file; nothing is required in it, as files are merged."""
    schema: dict[str, Any] = Config.model_json_schema()
    classes = {each.__name__: each for each in _sections(Config)}
    for name, part in (("Config", schema), *schema["$defs"].items()):
        if name not in classes:
            continue
        # a kind stays required: it tells sections of one name apart
        part["required"] = [key for key in part.pop("required", []) if key == "kind"]
        for key, text in texts_of(classes[name]).items():
            part["properties"][key]["description"] = " ".join(text.split())
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "mtrain"}


def _sections(section: type[Section]) -> set[type[Section]]:
    inner = {each for field in section.model_fields.values() for each in sections_in(field.annotation)}
    return {section, *(found for each in inner for found in _sections(each))}
