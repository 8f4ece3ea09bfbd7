"""What AutoTokenizer.from_pretrained makes of a folder: parts, added and special tokens, post-processor.

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
"""Returns the object in a file by its name; empty if the file is missing."""


class BuiltTokenizer(NamedTuple):
    model: Any
    named: dict[str, str]
    """Role, such as eos_token -> text, including roles that a model defines itself."""
    fresh: frozenset[str]
    """Roles whose token is declared nowhere else, and so is new at the end of the vocabulary."""


def build_tokenizer(folder: Path, read: ReadJson, load: Callable[[], Any], has_file: bool) -> BuiltTokenizer:
    """Builds the tokenizer of a folder, or raises NotReadError."""
    settings, content = read("tokenizer_config.json"), read(TOKENIZER_NAME) if has_file else {}
    _refuse_settings(settings)
    # like transformers, searches the texts of tokens as well as the parts
    name = class_of(settings, read("config.json"), '"ByteLevel"' in json.dumps(content, ensure_ascii=False))
    built = built_class(name)
    # transformers keeps the post-processor of tokenizer.json, and makes one only if it is missing
    settings = {
        key: each for key, each in settings.items() if not has_file or key not in ("add_bos_token", "add_eos_token")
    }
    given = _with_tokens(settings, read, content)
    lists = [folder / VOCABULARY_NAME, folder / MERGES_NAME]
    has_lists = built is not None and built.reads_merges_file and all(each.is_file() for each in lists)
    if not (has_file or has_lists):
        raise NotReadError(f"it has no tokenizer.json, which transformers' class {name} would make of other files")
    if built is None:
        model = load()
    else:
        parts = _parts(content) if has_file else BPE.read_file(*map(str, lists))
        model = built.build(*parts, given)
        given = {**built.named, **given}
        if has_file and (made := load().post_processor) is not None:
            model.post_processor = made
    if padding := (content.get("padding") or {}).get("pad_token"):
        given.setdefault("pad_token", padding)  # where neither the settings nor transformers' class name one
    return _with_special_tokens(model, given, built, has_file)


def _refuse_settings(settings: Mapping[str, Any]) -> None:
    versions = settings.get("fast_tokenizer_files")
    if isinstance(versions, list) and versions != [TOKENIZER_NAME]:
        raise NotReadError("its fast_tokenizer_files name other files for other versions of transformers")
    for key in ("split_special_tokens", "fix_mistral_regex"):
        if settings.get(key):
            raise NotReadError(f"its {key} lets transformers encode in another way")


def _parts(content: Mapping[str, Any]) -> tuple[Vocabulary, Merges]:
    """Returns vocabulary and merges of a tokenizer.json."""
    model = content.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list):  # form of a Unigram model
        vocabulary = {each[0] if isinstance(each, list) else each: place for place, each in enumerate(vocabulary)}
    if not isinstance(model, dict) or not isinstance(vocabulary, dict):
        raise NotReadError("its tokenizer.json has no vocabulary")
    pairs = (each.split(" ") if isinstance(each, str) else each for each in model.get("merges") or ())
    return vocabulary, [(first, second) for first, second in pairs]


def _with_tokens(settings: Mapping[str, Any], read: ReadJson, content: Mapping[str, Any]) -> dict[str, Any]:
    """Merges the settings with added and special tokens of other files; tokens become `AddedToken`s."""
    given = dict(settings)
    for role in ROLES:
        if isinstance(given.get(role), dict) and "__type" not in given[role]:  # the form of special_tokens_map.json
            given[role] = {"__type": "AddedToken", **given[role]}
    if _ADDITIONAL in given and not given.get(_EXTRA):
        given[_EXTRA] = given.pop(_ADDITIONAL)
    specific = {key: given.pop(key) for key in list(given) if _is_other_role(key, given[key], str)}
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
        # the text of a token; for an object its Python repr, which transformers compares
        texts = {str(given[role]) for role in ROLES if given.get(role)}
        texts |= {str(each) for each in given.get(_EXTRA) or ()}
        for text, id_ in read("added_tokens.json").items():
            decoder[id_] = AddedToken(
                text, rstrip=False, lstrip=False, normalized=text not in texts, special=text in texts
            )
        named = {str(token): token for token in decoder.values()}
        for each in content.get("added_tokens") or ():
            token = AddedToken(**{key: value for key, value in each.items() if key != "id"})
            decoder[each["id"]] = named[str(token)] = token
    given[_DECODER] = {}
    given = _as_tokens(given)
    for role in ROLES:
        if given.get(role) is not None:
            given[role] = named.get(str(given[role]), given[role])
    return {**given, _DECODER: decoder}


def _take_special_map(given: dict[str, Any], found: Mapping[str, Any]) -> None:
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
    if isinstance(value, dict) and value.get("__type") == "AddedToken":
        return AddedToken(**{key: each for key, each in value.items() if key != "__type"})
    if isinstance(value, dict):
        return {key: _as_tokens(each) for key, each in value.items()}
    return [_as_tokens(each) for each in value] if isinstance(value, list | tuple) else value


def _with_special_tokens(model: Any, given: dict[str, Any], built: BuiltClass | None, has_file: bool) -> BuiltTokenizer:
    if _ADDITIONAL in given and _EXTRA not in given:
        given[_EXTRA] = given.pop(_ADDITIONAL)
    named: dict[str, Any] = {role: given.get(role) for role in ROLES}
    found_specific = {key: each for key, each in given.items() if _is_other_role(key, each, str | AddedToken)}
    named |= {**found_specific, **given.get(_SPECIFIC, {})}
    extra = given.get(_EXTRA) or []
    if isinstance(extra, dict):
        named |= extra
        extra = []
    given_tokens = {role: each for role, each in named.items() if each is not None}
    wrong = next((role for role, each in given_tokens.items() if not isinstance(each, str | AddedToken)), None)
    is_list = isinstance(extra, list) and all(isinstance(each, str | AddedToken) for each in extra)
    if wrong is not None or not is_list:
        raise NotReadError(f"it names {wrong or _EXTRA} as something else than a token")
    tokens = [*given_tokens.values(), *extra]
    to_add = [token for _, token in sorted(given[_DECODER].items())]
    known = [token.content for token in model.get_added_tokens_decoder().values()] + [str(token) for token in to_add]
    for token in tokens:
        if str(token) not in known and token not in to_add:
            to_add.append(token)
    texts = {str(each) for each in given_tokens.values() if each}
    declared = {*known, *model.get_vocab(with_added_tokens=False)}
    fresh = frozenset(role for role, each in given_tokens.items() if str(each) not in declared)
    model.add_tokens([_special(token, texts) for token in to_add])
    result = BuiltTokenizer(model, {role: str(each) for role, each in given_tokens.items()}, fresh)
    says = not has_file and ("add_bos_token" in given or "add_eos_token" in given)
    if says or model.post_processor is None or (built is not None and built.drops_post_processor):
        _set_post_processor(result, bool(given.get("add_bos_token")), bool(given.get("add_eos_token")))
    if built is not None and built.adds_named == "special":
        model.add_tokens([AddedToken(text, special=True) for text in dict.fromkeys(map(str, tokens))])
    elif built is not None and built.adds_named == "posted":
        model.add_special_tokens(
            [AddedToken(each, special=True, normalized=False) if isinstance(each, str) else each for each in tokens]
        )
    return result


def _is_other_role(key: str, value: object, kinds: Any) -> bool:
    """Says whether a key of the settings names a token of a role that a model defines itself."""
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
        " ".join(f"{each}:{number}" for each in (first, text, last) if each) for number, text in enumerate(("$A", "$B"))
    )
    special = [(each, tokenizer.model.token_to_id(each)) for each in (first, last) if each]
    tokenizer.model.post_processor = TemplateProcessing(
        single=single, pair=f"{single} {second}", special_tokens=special
    )
