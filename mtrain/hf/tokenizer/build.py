"""What AutoTokenizer.from_pretrained makes of a folder: parts, added and special tokens, post-processor.

Source: transformers 5.24, tokenization_utils_base.py (_from_pretrained, __init__) and tokenization_utils_tokenizers.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mtrain.hf.tokenizer.classes import BuiltClass, Merges, NotReadError, built_class, class_of

TOKENIZER_NAME, VOCABULARY_NAME, MERGES_NAME = "tokenizer.json", "vocab.json", "merges.txt"
ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_EXTRA, _ADDITIONAL, _SPECIFIC = "extra_special_tokens", "additional_special_tokens", "model_specific_special_tokens"
_DECODER = "added_tokens_decoder"
_MISTRAL_SIZE = 100_000
"""Vocabulary size above which fix_mistral_regex replaces the pattern."""

ReadJson = Callable[[str], dict[str, Any]]
"""Returns the object in a file by its name; empty if the file is missing."""


class BuiltTokenizer(NamedTuple):
    model: Any
    named: dict[str, str]
    """Role, such as eos_token -> text, including roles that a model defines itself."""
    fresh: frozenset[str]
    """Roles whose token is declared nowhere else, and so is new at the end of the vocabulary."""


def build_tokenizer(folder: Path, read: ReadJson, load: Callable[[], Any], has_file: bool) -> BuiltTokenizer:
    """Builds the tokenizer of a folder.

    Raises:
        NotReadError: transformers would not read the folder, or by unknown code.
    """
    settings, content = read("tokenizer_config.json"), read(TOKENIZER_NAME) if has_file else {}
    _refuse_settings(settings)
    name = class_of(settings, read("config.json"), _mentions_bytes(content))
    built = built_class(name)
    # transformers keeps the post-processor of tokenizer.json, and makes one only if it is missing
    settings = {
        key: each for key, each in settings.items() if not has_file or key not in ("add_bos_token", "add_eos_token")
    }
    given = _with_tokens(settings, read, content, has_file)
    if built is None:
        if not has_file:
            raise NotReadError(f"it has no tokenizer.json, which transformers' class {name} would make of other files")
        model, named = load(), {}
    else:
        model, named = _built(built, folder, content, has_file, given, name), dict(built.named)
        if has_file and (made := load().post_processor) is not None:
            model.post_processor = made
    given = {**named, **given}
    if padding := (content.get("padding") or {}).get("pad_token"):
        given.setdefault("pad_token", padding)  # where neither the settings nor transformers' class name one
    return _with_special_tokens(model, given, built, has_file)


def _mentions_bytes(content: Mapping[str, Any]) -> bool:
    """Says whether a part is ByteLevel; like transformers, searches the texts of tokens as well."""
    import json

    return '"ByteLevel"' in json.dumps(content, ensure_ascii=False) if content else False


def _refuse_settings(settings: Mapping[str, Any]) -> None:
    versions = settings.get("fast_tokenizer_files")
    if isinstance(versions, list) and versions != [TOKENIZER_NAME]:
        raise NotReadError("its fast_tokenizer_files name other files for other versions of transformers")
    for key in ("split_special_tokens", "fix_mistral_regex"):
        if settings.get(key):
            raise NotReadError(f"its {key} lets transformers encode in another way")


def _built(
    built: BuiltClass, folder: Path, content: Mapping[str, Any], has_file: bool, given: Mapping[str, Any], name: str
) -> Any:
    if not has_file and not (
        built.reads_merges_file and (folder / VOCABULARY_NAME).is_file() and (folder / MERGES_NAME).is_file()
    ):
        raise NotReadError(f"it has no tokenizer.json, which transformers' class {name} would make of other files")
    if not has_file:
        from tokenizers.models import BPE

        listed = BPE.read_file(str(folder / VOCABULARY_NAME), str(folder / MERGES_NAME))
        return built.build(*listed, given)
    model = content.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list):  # form of a Unigram model
        vocabulary = {each[0] if isinstance(each, list) else each: place for place, each in enumerate(vocabulary)}
    if not isinstance(model, dict) or not isinstance(vocabulary, dict):
        raise NotReadError("its tokenizer.json has no vocabulary")
    return built.build(vocabulary, _merges(model), given)


def _merges(model: Mapping[str, Any]) -> Merges:
    pairs = (each.split(" ") if isinstance(each, str) else each for each in model.get("merges") or ())
    return [(first, second) for first, second in pairs]


def _with_tokens(
    settings: Mapping[str, Any], read: ReadJson, content: Mapping[str, Any], has_file: bool
) -> dict[str, Any]:
    """Merges the settings with added and special tokens of other files; tokens become `AddedToken`s."""
    from tokenizers import AddedToken

    given = dict(settings)
    for role in ROLES:
        if isinstance(given.get(role), dict) and "__type" not in given[role]:  # the form of special_tokens_map.json
            given[role] = {"__type": "AddedToken", **given[role]}
    if _ADDITIONAL in given and not given.get(_EXTRA):
        given[_EXTRA] = given.pop(_ADDITIONAL)
    specific = {key: given.pop(key) for key in list(given) if _is_specific(key, given[key])}
    if isinstance(given.get(_EXTRA), dict):
        specific |= given.pop(_EXTRA)
    if specific:
        given[_SPECIFIC] = specific
    decoder: dict[int, Any] = {}
    if _DECODER in given:
        for id_, token in given[_DECODER].items():
            decoder[int(id_)] = AddedToken(**token)
        named = {str(token): token for token in decoder.values()}
    else:
        _take_special_map(given, read("special_tokens_map.json"))
        texts = {_content_of(given[role]) for role in ROLES if given.get(role)}
        texts |= {_content_of(each) for each in given.get(_EXTRA) or ()}
        for text, id_ in read("added_tokens.json").items():
            decoder[id_] = AddedToken(
                text, rstrip=False, lstrip=False, normalized=text not in texts, special=text in texts
            )
        named = {str(token): token for token in decoder.values()}
        for each in content.get("added_tokens") or () if has_file else ():
            token = AddedToken(**{key: value for key, value in each.items() if key != "id"})
            decoder[each["id"]] = named[str(token)] = token
    given[_DECODER] = {}
    given = _as_tokens(given)
    for role in ROLES:
        if given.get(role) is not None:
            given[role] = named.get(str(given[role]), given[role])
    return {**given, _DECODER: decoder}


def _is_specific(key: str, value: object) -> bool:
    return key not in ROLES and key.endswith("_token") and isinstance(value, str)


def _content_of(value: object) -> str:
    """Returns the text of a token; for an object its Python repr, which transformers compares."""
    return str(value)


def _take_special_map(given: dict[str, Any], found: Mapping[str, Any]) -> None:
    from tokenizers import AddedToken

    for key, value in found.items():
        if isinstance(value, dict) and key != _EXTRA:
            value = AddedToken(**{name: each for name, each in value.items() if name != "special"}, special=True)
        elif key == _EXTRA and isinstance(value, list):
            known = list(given.get(_EXTRA) or [])
            for each in value:
                each = AddedToken(**each, special=True) if isinstance(each, dict) else each
                if each not in known:
                    known.append(each)
            value = known
        given[key] = value
    if isinstance(given.get(_EXTRA), dict):
        given.setdefault(_SPECIFIC, {}).update(given.pop(_EXTRA))


def _as_tokens(value: Any) -> Any:
    from tokenizers import AddedToken

    if isinstance(value, dict) and value.get("__type") == "AddedToken":
        return AddedToken(**{key: each for key, each in value.items() if key != "__type"})
    if isinstance(value, dict):
        return {key: _as_tokens(each) for key, each in value.items()}
    return [_as_tokens(each) for each in value] if isinstance(value, list | tuple) else value


def _with_special_tokens(model: Any, given: dict[str, Any], built: BuiltClass | None, has_file: bool) -> BuiltTokenizer:
    from tokenizers import AddedToken

    if _ADDITIONAL in given and _EXTRA not in given:
        given[_EXTRA] = given.pop(_ADDITIONAL)
    named: dict[str, Any] = {role: given.get(role) for role in ROLES}
    found_specific = {key: each for key, each in given.items() if _is_token_key(key, each)}
    named |= {**found_specific, **given.get(_SPECIFIC, {})}
    extra = given.get(_EXTRA) or []
    if isinstance(extra, dict):
        named |= extra
        extra = []
    wrong = next(
        (key for key, each in named.items() if each is not None and not isinstance(each, str | AddedToken)), None
    )
    if (
        wrong is not None
        or not isinstance(extra, list)
        or not all(isinstance(each, str | AddedToken) for each in extra)
    ):
        raise NotReadError(f"it names {wrong or _EXTRA} as something else than a token")
    to_add = [token for _, token in sorted(given[_DECODER].items())]
    known = [token.content for token in model.get_added_tokens_decoder().values()] + [str(token) for token in to_add]
    for token in [*(each for each in named.values() if each is not None), *extra]:
        if str(token) not in known and token not in to_add:
            to_add.append(token)
    texts = {str(each) for each in named.values() if each}
    declared = {*known, *model.get_vocab(with_added_tokens=False)}
    fresh = frozenset(role for role, each in named.items() if each is not None and str(each) not in declared)
    _add(model, [_special(token, texts) for token in to_add])
    result = BuiltTokenizer(model, {role: str(each) for role, each in named.items() if each is not None}, fresh)
    says = not has_file and ("add_bos_token" in given or "add_eos_token" in given)
    if says or model.post_processor is None or (built is not None and built.drops_post_processor):
        _set_post_processor(result, bool(given.get("add_bos_token")), bool(given.get("add_eos_token")))
    if built is not None and built.adds_named is not None:
        _add_named_again(model, built.adds_named, [*(each for each in named.values() if each is not None), *extra])
    return result


def _is_token_key(key: str, value: object) -> bool:
    from tokenizers import AddedToken

    return key not in ROLES and key.endswith("_token") and isinstance(value, str | AddedToken)


def _special(token: Any, named: set[str]) -> Any:
    from tokenizers import AddedToken

    if isinstance(token, str):
        return AddedToken(token, special=True)
    if not token.special and str(token) in named:
        token.special = True
    return token


def _add(model: Any, tokens: list[Any]) -> None:
    if tokens:
        model.add_tokens(tokens)


def _add_named_again(model: Any, how: str, tokens: list[Any]) -> None:
    from tokenizers import AddedToken

    if how == "special":
        _add(model, [AddedToken(text, special=True) for text in dict.fromkeys(map(str, tokens))])
        return
    again = [AddedToken(each, special=True, normalized=False) if isinstance(each, str) else each for each in tokens]
    if again:
        model.add_special_tokens(again)


def _set_post_processor(tokenizer: BuiltTokenizer, begins: bool, ends: bool) -> None:
    from tokenizers.processors import TemplateProcessing

    bos, eos = tokenizer.named.get("bos_token"), tokenizer.named.get("eos_token")
    first, last = bos if begins else None, eos if ends else None
    parts = [*([f"{first}:0"] if first else []), "$A:0", *([f"{last}:0"] if last else [])]
    special = [(each, tokenizer.model.token_to_id(each)) for each in (first, last) if each]
    pair = [*parts, *([f"{first}:1"] if first else []), "$B:1", *([f"{last}:1"] if last else [])]
    tokenizer.model.post_processor = TemplateProcessing(
        single=" ".join(parts), pair=" ".join(pair), special_tokens=special
    )
