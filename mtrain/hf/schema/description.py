"""Reads the architecture of a Hugging Face folder, for `model.hf`, without torch."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mtrain.base.errors import ConfigError, DataError
from mtrain.config.kinds import merged
from mtrain.config.schema.bounds import can_be_a_path
from mtrain.config.schema.model import ModelSection
from mtrain.hf.hub import how_to_download
from mtrain.hf.schema.config import DEPTHS, differences
from mtrain.hf.schema.family import Family
from mtrain.hf.schema.files import (
    CONFIG_NAME,
    SINGLE_NAME,
    has_weights,
    inside,
    read_header,
    read_json,
    weight_map,
)
from mtrain.hf.schema.registry import family_of, unknown_fields
from mtrain.hf.schema.tower import TEXT
from mtrain.hf.schema.values import shown_name
from mtrain.hf.tokenizer.tokenizer import NO_TOKENS, AddedTokens, load_tokenizer

ADDED_TOKENS = ("add_tokens", "add_special_tokens")
_DEPTHS, _VISION = "mtp_depths", "vision"
_SHOWN_FIELDS = 8


def described_model(folder: Path, depths: int = 0, with_vision: bool = False) -> ModelSection:
    """Reads the architecture of a folder's weights, or of its config.json alone if it has no weights.

    Args:
        depths: Requested MTP depths, which some families read only on request.
        with_vision: Whether the vision tower belongs to the model.
    """
    config = read_json(inside(folder, CONFIG_NAME))
    # reads the index only if it matters: the weights may lack MTP depths, or have a head despite tied tables
    names: Collection[str] | None = ()
    if depths or config.get(DEPTHS) or TEXT in config:
        names = None
        # planning needs no weights, which a start requires
        if has_weights(folder):
            names = weight_map(folder, config)
            names = read_header(inside(folder, SINGLE_NAME)).tensors if names is None else names
    return read_model(folder, config, names, depths, with_vision)[1]


def read_model(
    folder: Path,
    config: dict[str, Any],
    names: Collection[str] | None,
    depths: int = 0,
    with_vision: bool = False,
) -> tuple[Family, ModelSection]:
    """Returns the family and the model of a folder's config.json; `names` of its tensors are None if unknown."""
    try:
        family = family_of(config)
        family, model = family.with_depths(family.model(family.as_held(config, names)), depths, names)
        return family.with_vision(model, config) if with_vision else (family, model)
    except DataError as fault:
        # adds the folder, which entries do not know, to the first mention; later ones may be quotes of the file
        raise DataError(str(fault).replace(CONFIG_NAME, str(folder / CONFIG_NAME), 1)) from None


def notes_on_folder(folder: str | None) -> list[str]:
    """Returns a note on config.json fields of unknown meaning; empty without such fields."""
    if folder is None or not (Path(folder) / CONFIG_NAME).exists():
        return []
    unknown = unknown_fields(read_json(inside(Path(folder), CONFIG_NAME)))
    if not unknown:
        return []
    shown = ", ".join(map(shown_name, unknown[:_SHOWN_FIELDS]))
    more = f" and {len(unknown) - _SHOWN_FIELDS} more" if len(unknown) > _SHOWN_FIELDS else ""
    return [
        f"{folder}/{CONFIG_NAME} has fields that mtrain does not know, {shown}{more}: it keeps them and computes "
        "without them; `mtrain convert import --check-logits` compares with transformers"
    ]


def with_architecture(content: dict[Any, Any]) -> dict[Any, Any]:
    """Fills in `model.*`, before validation, from the folder in `model.hf`.

    If the folder no longer exists, the section must describe the model itself.
    """
    section = content.get("model")
    if not isinstance(section, dict) or not isinstance(folder := section.get("hf"), str) or not can_be_a_path(folder):
        return content
    if not (Path(folder) / CONFIG_NAME).exists():
        # a run's config.yaml has the full architecture
        if "num_layers" in section:
            return content
        raise ConfigError(
            f"model.hf={folder} has no {CONFIG_NAME}; name a Hugging Face folder with {CONFIG_NAME} and "
            f"*.safetensors{how_to_download(folder)}"
        )
    # before validation, which needs sizes from the folder
    depths = section.get(_DEPTHS)
    with_vision = section.get(_VISION) is not None
    described = described_model(Path(folder), depths if isinstance(depths, int) else 0, with_vision)
    described = with_tokens(described, Path(folder), _tokens_in(section))
    # the user's values take precedence, so that the check below reports contradictions by key
    filled = merged(described.model_dump(), section)
    try:
        model = ModelSection.model_validate(filled)
    except ValidationError:  # the caller validates again, and reports all faults
        return {**content, "model": filled}
    if differing := disagreements(described, model):
        shown = (f"model.{name}={mine} contradicts {folder}, which has {theirs}" for name, theirs, mine in differing)
        raise ConfigError("\n".join(f"{line}; remove the key, or name another model.hf" for line in shown))
    return {**content, "model": filled}


def _tokens_in(section: Mapping[Any, Any]) -> AddedTokens:
    """Returns the tokens that a section adds; none for malformed keys, which validation refuses."""
    lists = [section.get(key) or () for key in ADDED_TOKENS]
    is_right = all(
        isinstance(tokens, list | tuple) and all(isinstance(text, str) for text in tokens) for tokens in lists
    )
    return AddedTokens(*(tuple(tokens) for tokens in lists)) if is_right else NO_TOKENS


def with_tokens(described: ModelSection, folder: Path, added: AddedTokens) -> ModelSection:
    """Returns the folder's model with a row for each token that is added to its tokenizer.

    Added tokens use spare rows first, which many folders have.
    """
    if not any(added):
        return described
    rows = max(described.vocab_size, load_tokenizer(folder, added).vocab_size)
    return described.model_copy(update={"vocab_size": rows})


def disagreements(described: ModelSection, model: ModelSection) -> list[tuple[str, Any, Any]]:
    """Lists fields that would change the meaning of the folder's weights, as (name, folder's value, model's value).

    Allows fewer MTP depths, whose weights are not read, and a new head, which starts random.
    """
    if described.experts is not None and model.experts is not None:
        # dropping tokens in training does not change the meaning of the weights
        free = {"capacity_factor": described.experts.capacity_factor}
        model = model.model_copy(update={"experts": model.experts.model_copy(update=free)})
    differing = differences(described, model)
    if not described.output.is_new:  # any model may get a head
        differing = [item for item in differing if item[0] != "num_labels"]
    if model.mtp_depths > described.mtp_depths == 0:
        differing.append((_DEPTHS, 0, model.mtp_depths))
    return differing
