"""Finds the origin of a checkpoint's weights, and copies the files that came with them."""

import logging
import re
import shutil
from pathlib import Path
from typing import NamedTuple

from mtrain.base.errors import DataError
from mtrain.checkpoint.store.directory import checkpoint_at
from mtrain.checkpoint.store.imported import imported_model
from mtrain.checkpoint.store.megatron_checkpoint import megatron_folder
from mtrain.config import Config
from mtrain.config.schema.model import ModelSection
from mtrain.convert.endings import write_json
from mtrain.data.chat.template import SETTINGS_FILE, TEMPLATE_FILE, put_templates
from mtrain.hf.configuration import load_config
from mtrain.hf.schema.files import CONFIG_NAME, read_json, side_files
from mtrain.hf.schema.registry import ORIGIN
from mtrain.hf.tokenizer.tokenizer import HF_TOKENIZER_FILE, NO_TOKENS, AddedTokens, load_tokenizer
from mtrain.runs.folder import RunFolder

_log = logging.getLogger(__name__)

_TOKENIZER_FILES = (HF_TOKENIZER_FILE, SETTINGS_FILE, "special_tokens_map.json", "added_tokens.json", TEMPLATE_FILE)
_LISTED = "added_tokens_decoder"
"""Optional key of the settings that lists all added tokens."""
_OF_TOKENIZERS = re.compile(
    r"tokenizer.*|tekken\.json|vocab\..*|merges\.txt|.*_tokens.*\.json|.*\.(tiktoken|model|jinja)|chat_template.*"
)
"""Tokenizer files among those that a conversion copies."""


class ModelSource(NamedTuple):
    """Model in a checkpoint, and its origin."""

    model: ModelSection
    origin: Path | None
    """Folder with config.json, tokenizer and shard names of the weights that training started from."""
    context_tokens: int | None
    """Longest sequence in training, in tokens; None for an import."""
    tokenizer: Path | None = None
    """Tokenizer of the run, if the origin lacks one or the run may have another."""


def source_of(checkpoint: Path) -> ModelSource:
    imported = imported_model(checkpoint)
    if imported is not None:
        return ModelSource(imported, checkpoint / ORIGIN, None)
    path = checkpoint.resolve().parent.parent / "config.yaml"
    if not path.exists():
        raise DataError(
            f"{path}, which describes the model of {checkpoint}, does not exist; name a checkpoint in its run"
        )
    return source_of_run(load_config([path], []))


def source_of_run(run: Config) -> ModelSource:
    """Returns the model of a run, and the origin of its initial weights."""
    origin = _origin_of(run.model.hf, run.checkpoint.initialize_from)
    tokenizer = None if run.data.tokenizer is None else Path(run.data.tokenizer)
    if origin is not None and not run.data.allow_other_tokenizer:
        tokenizer = None
    return ModelSource(run.model, origin, run.data.seq_length, tokenizer)


def _origin_of(hf: str | None, start: str | None) -> Path | None:
    if hf is not None and (Path(hf) / CONFIG_NAME).exists():
        return Path(hf)
    if start is None or not Path(start).exists() or megatron_folder(Path(start)) is not None:
        return None
    entry = checkpoint_at(Path(start)).entry
    assert entry is not None, "checkpoint_at raises without one"
    return source_of(entry.path).origin


def put_side_files(
    folder: Path,
    checkpoint: Path,
    origin: Path | None,
    tokenizer: Path | None,
    added: AddedTokens = NO_TOKENS,
    but: tuple[str, ...] = (),
) -> bool:
    """Copies the origin's tokenizer, licence and other files, and the run's chat templates; returns whether it has any.

    The tokenizer of `ModelSource`, if any, replaces the origin's.
    """
    if origin is not None:
        for name in (path for path in side_files(origin) if path.as_posix() not in but):
            if tokenizer is not None and _OF_TOKENIZERS.fullmatch(name.name):
                continue
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(origin / name, folder / name)
    if tokenizer is not None:
        _copy_tokenizer(tokenizer, folder)
    _put_added_tokens(folder, added)
    trained = RunFolder(checkpoint.resolve().parent.parent).saved_chat_templates()
    if trained:  # the run formatted conversations with them
        put_templates(trained, folder)
    return bool(trained)


def _put_added_tokens(folder: Path, added: AddedTokens) -> None:
    """Writes added tokens into a copied tokenizer for transformers to read, unless it has them all."""
    path = folder / HF_TOKENIZER_FILE
    if not any(added) or not path.is_file():
        return
    content, texts = read_json(path), [*added.plain, *added.special]
    existing = content.get("added_tokens") or []
    first = load_tokenizer(folder).vocab_size
    if [entry.get("content") for entry in existing][-len(texts) :] == texts:  # --like names an earlier export
        return
    expected = load_tokenizer(folder, added)
    sides = dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    tokens = [
        {"content": text, **sides, "normalized": text in added.plain, "special": text in added.special}
        for text in texts
    ]
    new = [{"id": id_, **token} for id_, token in enumerate(tokens, first)]
    write_json(path, {**content, "added_tokens": [*existing, *new]})
    settings = folder / SETTINGS_FILE
    if settings.is_file() and isinstance(listed := read_json(settings).get(_LISTED), dict):
        more = {str(id_): token for id_, token in enumerate(tokens, first)}
        write_json(settings, {**read_json(settings), _LISTED: {**listed, **more}})
    if not load_tokenizer(folder).encodes_like(expected):
        raise DataError(
            f"{path} with model.add_tokens encodes text differently than the run's tokenizer; export with --like"
        )


def _copy_tokenizer(path: Path, folder: Path) -> None:
    """Copies the tokenizer of a run whose weights came without one; transformers needs its tokenizer.json."""
    source = path if path.is_dir() else path.parent
    if not (source / HF_TOKENIZER_FILE).is_file():
        _log.info(f"note: no tokenizer.json at {path}, so {folder.name} gets no tokenizer")
        return
    for name in (name for name in _TOKENIZER_FILES if (source / name).is_file()):
        shutil.copyfile(source / name, folder / name)
