"""Builds the tokenizer that AutoTokenizer.from_pretrained would: parts, added and special tokens, post-processor.

Source: transformers 5.24, tokenization_utils_base.py (_from_pretrained, __init__) and tokenization_utils_tokenizers.py.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from mtrain.hf.tokenizer.classes import BuiltClass, Merges, NotReadError, Vocabulary, built_class, class_of

TOKENIZER_NAME, VOCABULARY_NAME, MERGES_NAME = "tokenizer.json", "vocab.json", "merges.txt"
ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_EXTRA, _ADDITIONAL, _SPECIFIC = "extra_special_tokens", "additional_special_tokens", "model_specific_special_tokens"
_DECODER = "added_tokens_decoder"

ReadJson = Callable[[str], dict[str, Any]]
"""Maps the name of a file to the object in it; empty if the file is missing."""


class BuiltTokenizer(NamedTuple):
    model: Any
    named: dict[str, str]
    """Role, such as eos_token -> text, including a model's own roles."""
    fresh: frozenset[str]
    """Roles whose token is not declared elsewhere, so that it is appended to the vocabulary."""


def build_tokenizer(folder: Path, read: ReadJson, load: Callable[[], Any], has_file: bool) -> BuiltTokenizer:
    """Builds the tokenizer of a folder; raises NotReadError if transformers would not, or needs unknown code."""
    settings, content = read("tokenizer_config.json"), read(TOKENIZER_NAME) if has_file else {}
    _refuse_settings(settings)
    # like transformers, searches all of tokenizer.json, even the texts of tokens
    name = class_of(settings, read("config.json"), '"ByteLevel"' in json.dumps(content, ensure_ascii=False))
    built = built_class(name)
    # transformers keeps tokenizer.json's post-processor, and creates one only if it is missing
    settings = {
        key: value for key, value in settings.items() if not has_file or key not in ("add_bos_token", "add_eos_token")
    }
    complete = _with_tokens(settings, read, content)
    lists = [folder / VOCABULARY_NAME, folder / MERGES_NAME]
    has_lists = built is not None and built.reads_merges_file and all(path.is_file() for path in lists)
    if not (has_file or has_lists):
        raise NotReadError(f"it has no tokenizer.json, which transformers' class {name} would build from other files")
    if built is None:
        model = load()
    else:
        parts = _parts(content) if has_file else BPE.read_file(*map(str, lists))
        model = built.build(*parts, complete)
        complete = {**built.named, **complete}
        if has_file and (made := load().post_processor) is not None:
            model.post_processor = made
    if padding := (content.get("padding") or {}).get("pad_token"):
        complete.setdefault("pad_token", padding)  # where neither the settings nor transformers' class name one
    return _with_special_tokens(model, complete, built, has_file)


def _refuse_settings(settings: Mapping[str, Any]) -> None:
    versions = settings.get("fast_tokenizer_files")
    if isinstance(versions, list) and versions != [TOKENIZER_NAME]:
        raise NotReadError("its fast_tokenizer_files names different files for different versions of transformers")
    for key in ("split_special_tokens", "fix_mistral_regex"):
        if settings.get(key):
            raise NotReadError(f"its {key} makes transformers encode differently")


def _parts(content: Mapping[str, Any]) -> tuple[Vocabulary, Merges]:
    """Returns the vocabulary and merges of a tokenizer.json."""
    model = content.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list):  # a Unigram model's
        vocabulary = {entry[0] if isinstance(entry, list) else entry: index for index, entry in enumerate(vocabulary)}
    if not isinstance(model, dict) or not isinstance(vocabulary, dict):
        raise NotReadError("its tokenizer.json has no vocabulary")
    pairs = (entry.split(" ") if isinstance(entry, str) else entry for entry in model.get("merges") or ())
    return vocabulary, [(first, second) for first, second in pairs]


def _with_tokens(settings: Mapping[str, Any], read: ReadJson, content: Mapping[str, Any]) -> dict[str, Any]:
    """Merges the settings with added and special tokens from other files; converts tokens to `AddedToken`."""
    result = dict(settings)
    for role in ROLES:
        if isinstance(result.get(role), dict) and "__type" not in result[role]:  # the form of special_tokens_map.json
            result[role] = {"__type": "AddedToken", **result[role]}
    if _ADDITIONAL in result and not result.get(_EXTRA):
        result[_EXTRA] = result.pop(_ADDITIONAL)
    specific = {key: result.pop(key) for key in list(result) if _is_other_role(key, result[key], str)}
    if isinstance(result.get(_EXTRA), dict):
        specific |= result.pop(_EXTRA)
    if specific:
        result[_SPECIFIC] = specific
    decoder: dict[int, Any] = {}
    if _DECODER in result:
        for id_, token in result[_DECODER].items():
            decoder[int(id_)] = AddedToken(**token)
        named = {str(token): token for token in decoder.values()}
    else:
        _take_special_map(result, read("special_tokens_map.json"))
        # the text of a token, or for an object its Python repr, which transformers compares
        texts = {str(result[role]) for role in ROLES if result.get(role)}
        texts |= {str(entry) for entry in result.get(_EXTRA) or ()}
        for text, id_ in read("added_tokens.json").items():
            decoder[id_] = AddedToken(
                text, rstrip=False, lstrip=False, normalized=text not in texts, special=text in texts
            )
        named = {str(token): token for token in decoder.values()}
        for entry in content.get("added_tokens") or ():
            token = AddedToken(**{key: value for key, value in entry.items() if key != "id"})
            decoder[entry["id"]] = named[str(token)] = token
    result[_DECODER] = {}
    result = _as_tokens(result)
    for role in ROLES:
        if result.get(role) is not None:
            result[role] = named.get(str(result[role]), result[role])
    return {**result, _DECODER: decoder}


def _take_special_map(settings: dict[str, Any], special_map: Mapping[str, Any]) -> None:
    for key, value in special_map.items():
        if isinstance(value, dict) and key != _EXTRA:
            value = AddedToken(**{name: field for name, field in value.items() if name != "special"}, special=True)
        elif key == _EXTRA and isinstance(value, list):
            known = list(settings.get(_EXTRA) or [])
            for token in value:
                token = AddedToken(**token, special=True) if isinstance(token, dict) else token
                if token not in known:
                    known.append(token)
            value = known
        settings[key] = value
    if isinstance(settings.get(_EXTRA), dict):
        settings.setdefault(_SPECIFIC, {}).update(settings.pop(_EXTRA))


def _as_tokens(value: Any) -> Any:
    if isinstance(value, dict) and value.get("__type") == "AddedToken":
        return AddedToken(**{key: item for key, item in value.items() if key != "__type"})
    if isinstance(value, dict):
        return {key: _as_tokens(item) for key, item in value.items()}
    return [_as_tokens(item) for item in value] if isinstance(value, list | tuple) else value


def _with_special_tokens(
    model: Any, settings: dict[str, Any], built: BuiltClass | None, has_file: bool
) -> BuiltTokenizer:
    if _ADDITIONAL in settings and _EXTRA not in settings:
        settings[_EXTRA] = settings.pop(_ADDITIONAL)
    named: dict[str, Any] = {role: settings.get(role) for role in ROLES}
    specific = {key: value for key, value in settings.items() if _is_other_role(key, value, str | AddedToken)}
    named |= {**specific, **settings.get(_SPECIFIC, {})}
    extra = settings.get(_EXTRA) or []
    if isinstance(extra, dict):
        named |= extra
        extra = []
    role_tokens = {role: value for role, value in named.items() if value is not None}
    wrong = next((role for role, value in role_tokens.items() if not isinstance(value, str | AddedToken)), None)
    is_list = isinstance(extra, list) and all(isinstance(value, str | AddedToken) for value in extra)
    if wrong is not None or not is_list:
        raise NotReadError(f"its {wrong or _EXTRA} is not a token")
    tokens = [*role_tokens.values(), *extra]
    to_add = [token for _, token in sorted(settings[_DECODER].items())]
    known = [token.content for token in model.get_added_tokens_decoder().values()] + [str(token) for token in to_add]
    for token in tokens:
        if str(token) not in known and token not in to_add:
            to_add.append(token)
    texts = {str(value) for value in role_tokens.values() if value}
    declared = {*known, *model.get_vocab(with_added_tokens=False)}
    fresh = frozenset(role for role, value in role_tokens.items() if str(value) not in declared)
    model.add_tokens([_special(token, texts) for token in to_add])
    result = BuiltTokenizer(model, {role: str(value) for role, value in role_tokens.items()}, fresh)
    is_set = not has_file and ("add_bos_token" in settings or "add_eos_token" in settings)
    if is_set or model.post_processor is None or (built is not None and built.drops_post_processor):
        _set_post_processor(result, bool(settings.get("add_bos_token")), bool(settings.get("add_eos_token")))
    if built is not None and built.adds_named == "special":
        model.add_tokens([AddedToken(text, special=True) for text in dict.fromkeys(map(str, tokens))])
    elif built is not None and built.adds_named == "posted":
        model.add_special_tokens(
            [AddedToken(value, special=True, normalized=False) if isinstance(value, str) else value for value in tokens]
        )
    return result


def _is_other_role(key: str, value: object, kinds: Any) -> bool:
    """Returns whether a key of the settings names the token of a model's own role."""
    return key not in ROLES and key.endswith("_token") and isinstance(value, kinds)


def _special(token: Any, named: set[str]) -> Any:
    if isinstance(token, str):
        return AddedToken(token, special=True)
    if not token.special and str(token) in named:
        token.special = True
    return token


def _set_post_processor(tokenizer: BuiltTokenizer, begins: bool, ends: bool) -> None:
    bos, eos = tokenizer.named.get("bos_token"), tokenizer.named.get("eos_token")
    first, last = bos if begins else None, eos if ends else None
    single, second = (
        " ".join(f"{piece}:{number}" for piece in (first, text, last) if piece)
        for number, text in enumerate(("$A", "$B"))
    )
    special = [(piece, tokenizer.model.token_to_id(piece)) for piece in (first, last) if piece]
    tokenizer.model.post_processor = TemplateProcessing(
        single=single, pair=f"{single} {second}", special_tokens=special
    )
