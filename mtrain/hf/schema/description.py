"""The architecture of a Hugging Face folder, for `model.hf`; loads no torch."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mtrain.base.errors import ConfigError, DataError
from mtrain.config.kinds import merged
from mtrain.config.schema.bounds import can_be_a_path
from mtrain.config.schema.model import ModelSection
from mtrain.hf.schema.config import DEPTHS, differences
from mtrain.hf.schema.family import Family
from mtrain.hf.schema.files import (
    CONFIG_NAME,
    SINGLE_NAME,
    chosen_places,
    has_weights,
    how_to_download,
    inside,
    read_header,
    read_json,
)
from mtrain.hf.schema.registry import family_of, fields_nobody_knows
from mtrain.hf.schema.tower import TEXT
from mtrain.hf.schema.values import shown_name
from mtrain.hf.tokenizer.tokenizer import NO_TOKENS, AddedTokens, load_tokenizer

ADDED_TOKENS = ("add_tokens", "add_special_tokens")
_DEPTHS = "mtp_depths"
_SHOWN_FIELDS = 8


def described_model(folder: Path, depths: int = 0) -> ModelSection:
    """Reads the architecture of a folder's weights, or without weights that of its config.json.

    Some families read MTP depths only on request.
    """
    config = read_json(inside(folder, CONFIG_NAME))
    # the index is read only where it matters: a config may promise depths, or tied tables, that are not there
    names: Collection[str] | None = ()
    if depths or config.get(DEPTHS) or TEXT in config:
        names = None
        # a plan is made before weights are downloaded, or on another machine; a start refuses a folder without
        if has_weights(folder):
            names = chosen_places(folder, config)
            names = read_header(inside(folder, SINGLE_NAME)).tensors if names is None else names
    return read_model(folder, config, names, depths)[1]


def read_model(
    folder: Path, config: dict[str, Any], names: Collection[str] | None, depths: int = 0
) -> tuple[Family, ModelSection]:
    """Reads the family and the model of a folder's config.json; `names` are those of its tensors, None if unknown."""
    try:
        family = family_of(config)
        return family.with_depths(family.model(family.as_held(config, names)), depths, names)
    except DataError as fault:
        # the entries do not know the folder; only the first mention, as the message may quote the file
        raise DataError(str(fault).replace(CONFIG_NAME, str(folder / CONFIG_NAME), 1)) from None


def notes_on_folder(folder: str | None) -> list[str]:
    """Returns a note on config.json fields of unknown meaning, if any."""
    if folder is None or not (Path(folder) / CONFIG_NAME).exists():
        return []
    unknown = fields_nobody_knows(read_json(inside(Path(folder), CONFIG_NAME)))
    if not unknown:
        return []
    shown = ", ".join(map(shown_name, unknown[:_SHOWN_FIELDS]))
    more = f" and {len(unknown) - _SHOWN_FIELDS} more" if len(unknown) > _SHOWN_FIELDS else ""
    return [
        f"{folder}/{CONFIG_NAME} has fields that are unknown here, {shown}{more}: they are kept and do not affect the "
        "computation; `mtrain convert import --check-logits` compares with transformers"
    ]


def with_architecture(content: dict[Any, Any]) -> dict[Any, Any]:
    """Fills `model.*` of sections that are not validated yet in from the folder that `model.hf` names.

    Long after a run the folder may be gone; the section must then describe the model itself.
    """
    given = content.get("model")
    if not isinstance(given, dict) or not isinstance(folder := given.get("hf"), str) or not can_be_a_path(folder):
        return content
    if not (Path(folder) / CONFIG_NAME).exists():
        # a run's own config.yaml: it has the full architecture, and the folder may be gone by now
        if "num_layers" in given:
            return content
        raise ConfigError(
            f"model.hf={folder} holds no {CONFIG_NAME}; name a folder of Hugging Face with {CONFIG_NAME} and "
            f"*.safetensors{how_to_download(folder)}"
        )
    # before the section is validated, which asks for sizes that only the folder gives
    depths = given.get(_DEPTHS)
    described = described_model(Path(folder), depths if isinstance(depths, int) else 0)
    described = with_tokens(described, Path(folder), _tokens_in(given))
    # the user's value takes precedence, so that a contradiction is reported by its key below
    filled = merged(described.model_dump(), given)
    try:
        model = ModelSection.model_validate(filled)
    except ValidationError:  # reported with everything else that is wrong
        return {**content, "model": filled}
    if differing := disagreements(described, model):
        shown = (
            f"model.{name}={mine} does not agree with {folder}, which says {theirs}" for name, theirs, mine in differing
        )
        raise ConfigError("\n".join(f"{line}; remove the key, or name another model.hf" for line in shown))
    return {**content, "model": filled}


def _tokens_in(given: Mapping[Any, Any]) -> AddedTokens:
    """Returns the tokens that a section adds; none for malformed keys, which its own rules refuse."""
    found = [given.get(key) or () for key in ADDED_TOKENS]
    is_right = all(isinstance(each, list | tuple) and all(isinstance(text, str) for text in each) for each in found)
    return AddedTokens(*(tuple(each) for each in found)) if is_right else NO_TOKENS


def with_tokens(described: ModelSection, folder: Path, added: AddedTokens) -> ModelSection:
    """Returns the folder's model with a row for each token that is added to its tokenizer.

    Many folders have more rows than tokens; spare rows are used first.
    """
    if not any(added):
        return described
    rows = max(described.vocab_size, load_tokenizer(folder, added).vocab_size)
    return described.model_copy(update={"vocab_size": rows})


def disagreements(described: ModelSection, model: ModelSection) -> list[tuple[str, Any, Any]]:
    """Lists fields that would change the meaning of the folder's weights: name, folder's value, model's value.

    Fewer MTP depths are allowed, whose weights stay unread, and so is a head, which starts random.
    """
    if described.experts is not None and model.experts is not None:
        # dropping tokens in training does not change the meaning of the weights
        free = {"capacity_factor": described.experts.capacity_factor}
        model = model.model_copy(update={"experts": model.experts.model_copy(update=free)})
    found = differences(described, model)
    if not described.output.is_new:  # a head may be put on any model
        found = [each for each in found if each[0] != "num_labels"]
    if model.mtp_depths > described.mtp_depths == 0:
        found.append((_DEPTHS, 0, model.mtp_depths))
    return found
