"""Records as token ids, by hand: a is 4, b is 5, ..."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtrain.base.errors import DataError
from mtrain.config import Config
from mtrain.config.schema.data import SftSection
from mtrain.data.chat.sandbox import Cut, Renderer, RenderLimits, Sandbox
from mtrain.data.encoding.encoder import RecordEncoder, trained_templates
from mtrain.data.encoding.plain import PLAIN_TEMPLATE, sharegpt_as_messages
from mtrain.hf.tokenizer.tokenizer import load_tokenizer
from tests.fault_table import Notice
from tests.messages import refuses


@pytest.fixture
def encoder(word_tokenizer: Path, make_config: Callable[..., Config]) -> Callable[..., RecordEncoder]:
    def build(**keys: Any) -> RecordEncoder:
        data = {"kind": "sft", "train": [{"path": "x"}], "tokenizer": str(word_tokenizer), **keys}
        section = make_config(data).data
        assert isinstance(section, SftSection)
        return RecordEncoder(section, load_tokenizer(word_tokenizer))

    return build


def test_prompt_and_response(encoder: Callable[..., RecordEncoder]) -> None:
    sample = encoder().encode({"prompt": "a b", "response": "c d e", "weight": 0.5})
    assert sample.ids.tolist() == [1, 4, 5, 6, 7, 8, 2]
    assert sample.loss_weights.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert sample.weight == 0.5


def test_plain_messages(encoder: Callable[..., RecordEncoder]) -> None:
    sample = encoder(chat_template="plain").encode({"messages": CHAT})
    assert sample.ids.tolist() == [1, 14, 15, 4, 14, 16, 5, 2]
    assert sample.loss_weights.tolist() == [0, 0, 0, 0, 0, 0, 1, 1]


@pytest.mark.parametrize("pad", ["</s>", "<s>", "b", "user", None])
def test_a_token_that_pads_counts_as_any_other(
    pad: str | None, encoder: Callable[..., RecordEncoder], make_config: Callable[..., Config], tmp_path: Path
) -> None:
    """Compares with a tokenizer whose pad_token stands in no text."""
    records: dict[str, dict[str, Any]] = {
        "prompt_response": {"prompt": "a b", "response": "b c b"},
        "text": {"text": "b a user b"},
        "messages": {"messages": CHAT * 2},
    }
    template = tmp_path / "own.jinja"
    template.write_text(
        "<s>{% for m in messages %} {{ m.role }} {{ m.content }} "
        "{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %} assistant {% endif %}"
    )
    folder = Path(encoder()._tokenizer.path).parent
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "pad_token": pad}))
    for form, record in records.items():
        for chat_template in ("plain", str(template)) if form == "messages" else ("auto",):
            data = {"kind": "sft", "train": [{"path": "x"}], "format": form, "chat_template": chat_template}
            found = []
            for place in (folder, tmp_path):
                section = make_config({**data, "tokenizer": str(place)}).data
                assert isinstance(section, SftSection)
                sample = RecordEncoder(section, load_tokenizer(place)).encode(record)
                found.append((sample.ids.tolist(), sample.loss_weights.tolist()))
            assert found[0] == found[1]
            assert sum(found[0][1]) >= 3


def test_the_fingerprint_of_a_plain_form_is_that_of_its_tokenizer(
    encoder: Callable[..., RecordEncoder], word_tokenizer: Path
) -> None:
    """A run of version 0.1.0 then recognises its data."""
    assert encoder().fingerprint == load_tokenizer(word_tokenizer).fingerprint


def test_a_completion_is_a_response(encoder: Callable[..., RecordEncoder]) -> None:
    sample = encoder().encode({"prompt": "a b", "completion": "c"})
    assert sample.ids.tolist() == [1, 4, 5, 6, 2]
    assert sample.loss_weights.tolist() == [0, 0, 0, 1, 1]


def test_only_the_response_of_two_lists_of_messages_is_learned(encoder: Callable[..., RecordEncoder]) -> None:
    plain = encoder(chat_template="plain")
    sample = plain.encode({"prompt": [*CHAT, CHAT[0]], "completion": [CHAT[1]]})
    assert sample.ids.tolist() == plain.encode({"messages": [*CHAT, *CHAT]}).ids.tolist()
    assert sample.loss_weights.tolist() == [0] * (len(sample.ids) - 2) + [1, 1]


def test_columns_are_renamed(encoder: Callable[..., RecordEncoder]) -> None:
    renaming = encoder(columns={"question": "prompt", "answer": "response", "source": "id"}, ignore_keys=["id"])
    assert renaming.encode({"question": "a", "answer": "b", "source": 3}).ids.tolist() == [1, 4, 5, 2]
    with refuses(DataError, "'source'", "data.columns"):
        renaming.encode({"question": "a", "answer": "b"})
    with refuses(DataError, "'prompt'", "data.columns"):
        renaming.encode({"question": "a", "answer": "b", "source": 3, "prompt": "c"})


OTHER_FORMS: dict[str, dict[str, Any]] = {
    "data.format=sharegpt": {"conversations": [{"from": "human", "value": "a"}]},
    "data.format=alpaca": {"instruction": "a", "output": "b"},
    "data.format=text": {"text": "a"},
    "loss.function=dpo": {"chosen": "a", "rejected": "b"},
    "data.columns": {"question": "a", "answer": "b"},
}


@pytest.mark.parametrize("change", OTHER_FORMS)
def test_a_record_of_another_form_names_it(change: str, encoder: Callable[..., RecordEncoder]) -> None:
    with refuses(DataError, change):
        encoder().encode(OTHER_FORMS[change])


def test_an_unknown_key_is_refused_unless_it_is_named(encoder: Callable[..., RecordEncoder]) -> None:
    record = {"prompt": "a", "response": "b", "id": 1}
    with refuses(DataError, "'id'", "data.ignore_keys"):
        encoder().encode(record)
    assert encoder(ignore_keys=["id"]).encode(record).ids.tolist() == [1, 4, 5, 2]


CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.fault(
    "input",
    "messages with a tokenizer whose folder has no chat template",
    happens="refused with file and line; data.chat_template=plain writes plain headers on purpose",
    exit_code=3,
)
def test_messages_without_a_template_are_refused(encoder: Callable[..., RecordEncoder], notice: Notice) -> None:
    with notice, refuses(DataError) as caught:
        encoder().encode({"messages": CHAT})
    assert caught.value.exit_code == notice.exit_code


def test_plain_messages_have_weights_too(encoder: Callable[..., RecordEncoder]) -> None:
    messages = [*CHAT, {"role": "user", "content": "c", "train": False}, {**CHAT[1], "content": "d", "weight": 0.5}]
    plain = encoder(chat_template="plain")
    assert plain.encode({"messages": messages}).loss_weights.tolist() == [*[0] * 6, 1, 1, *[0] * 5, 0.5, 0.5]
    last = encoder(chat_template="plain", loss_on="last_answer").encode({"messages": messages})
    assert last.loss_weights.tolist() == [*[0] * 13, 0.5, 0.5]
    assert last.ids.tolist() == plain.encode({"messages": messages}).ids.tolist()
    with refuses(DataError, "'tools'"):
        plain.encode({"messages": CHAT, "tools": [{}]})


def test_a_text_is_in_the_loss_as_a_whole(encoder: Callable[..., RecordEncoder]) -> None:
    sample = encoder(format="text").encode({"text": "a b"})
    assert sample.ids.tolist() == [1, 4, 5, 2]
    assert sample.loss_weights.tolist() == [0, 1, 1, 1]
    special = encoder(format="text", special_tokens_in_text=True)
    assert special.encode({"text": "<s> a </s> b </s>"}).ids.tolist() == [1, 4, 2, 5, 2], "neither is added twice"
    assert special.encode({"text": "a b"}).ids.tolist() == [1, 4, 5, 2]


def test_tokens_are_taken_as_they_are(encoder: Callable[..., RecordEncoder]) -> None:
    for form in ("auto", "tokens"):
        sample = encoder(format=form).encode({"input_ids": [4, 5, 6], "loss_mask": [0, 1, 0.5], "weight": 2})
        assert sample.ids.tolist() == [4, 5, 6]
        assert sample.loss_weights.tolist() == [0, 1, 0.5]
        assert sample.weight == 2


def test_alpaca(encoder: Callable[..., RecordEncoder]) -> None:
    record = {"instruction": "a", "input": "b", "output": "c", "system": "d", "history": [["e", "f"]]}
    roles = ["system", "user", "assistant", "user", "assistant"]
    messages = [{"role": role, "content": text} for role, text in zip(roles, ["d", "e", "f", "a\nb", "c"])]
    same = encoder(chat_template="plain").encode({"messages": messages})
    found = encoder(chat_template="plain", format="alpaca").encode(record)
    assert found.ids.tolist() == same.ids.tolist()
    assert found.loss_weights.tolist() == same.loss_weights.tolist()


def test_sharegpt(encoder: Callable[..., RecordEncoder]) -> None:
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    record = {"conversations": turns, "system": "c", "tools": ""}
    found = encoder(chat_template="plain", format="sharegpt").encode(record)
    messages = [{"role": "system", "content": "c"}, *CHAT]
    assert found.ids.tolist() == encoder(chat_template="plain").encode({"messages": messages}).ids.tolist()


def test_a_call_of_sharegpt_becomes_a_tool_call() -> None:
    turns = [
        {"from": "human", "value": "a"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {}}', "train": False},
        {"from": "observation", "value": "1"},
    ]
    assert sharegpt_as_messages({"conversations": turns, "tools": "[]"}, frozenset()) == {
        "tools": "[]",
        "messages": [
            {"role": "user", "content": "a"},
            {
                "role": "assistant",
                "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}],
                "train": False,
            },
            {"role": "tool", "content": "1"},
        ],
    }


@pytest.mark.fault(
    "input",
    "a line that is not of the form that data.format names",
    happens="refused with file, line and what the form needs",
    exit_code=3,
)
@pytest.mark.parametrize(
    ("form", "record", "fact"),
    [
        ("auto", {"messages": CHAT, "prompt": "a"}, "messages"),
        ("auto", {"text": "a"}, "'prompt'"),
        ("prompt_response", {"messages": CHAT}, "'prompt'"),
        ("messages", {"prompt": "a", "response": "b"}, "'messages'"),
        ("text", {"text": ""}, "'text'"),
        ("text", {"text": "a", "prompt": "b"}, "'prompt'"),
        ("tokens", {"input_ids": [4, 5]}, "'loss_mask'"),
        ("tokens", {"input_ids": [4, 5], "loss_mask": [1]}, "input_ids"),
        ("tokens", {"input_ids": [4, 99], "loss_mask": [0, 1]}, "input_ids[1]"),
        ("tokens", {"input_ids": [4, True], "loss_mask": [0, 1]}, "input_ids[1]"),
        ("tokens", {"input_ids": [4, 5], "loss_mask": [0, -1]}, "'loss_mask'"),
        ("tokens", {"input_ids": [4, 5], "loss_mask": [1, 0]}, "token"),
        ("alpaca", {"instruction": "a"}, "'output'"),
        ("alpaca", {"instruction": "a", "output": "b", "history": ["x"]}, "'history'"),
        ("sharegpt", {"conversations": []}, "'conversations'"),
        ("sharegpt", {"conversations": [{"from": "me", "value": "a"}]}, "conversations[0]"),
        ("sharegpt", {"conversations": [{"from": "function_call", "value": "f("}]}, "conversations[0]"),
        ("sharegpt", {"conversations": [{"from": "gpt", "text": "a"}]}, "conversations[0]"),
    ],
)
def test_a_record_of_another_form_is_refused(
    form: str, record: dict[str, Any], fact: str, encoder: Callable[..., RecordEncoder], notice: Notice
) -> None:
    with notice, refuses(DataError, fact) as caught:
        encoder(format=form, chat_template="plain").encode(record)
    assert caught.value.exit_code == notice.exit_code


def test_the_fingerprint_follows_the_options(encoder: Callable[..., RecordEncoder]) -> None:
    options: list[dict[str, Any]] = [{}, {"loss_on": "last_answer"}, {"special_tokens_in_text": True}]
    assert len({encoder(**each).fingerprint for each in options}) == 3


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, {}),
        ({"chat_template": "plain"}, {}),  # there may be only prompts and responses
        ({"chat_template": "plain", "format": "messages"}, {"chat_template.jinja": PLAIN_TEMPLATE}),
    ],
)
def test_an_export_carries_the_template_that_was_trained(
    keys: dict[str, Any], expected: dict[str, str], word_tokenizer: Path, make_config: Callable[..., Config]
) -> None:
    section = make_config({"kind": "sft", "train": [{"path": "x"}], "tokenizer": str(word_tokenizer), **keys}).data
    assert isinstance(section, SftSection)
    assert trained_templates(section) == expected


def test_the_template_of_the_plain_form_writes_it(encoder: Callable[..., RecordEncoder], word_tokenizer: Path) -> None:
    variables = {"bos_token": "<s> ", "eos_token": " </s>"}  # this tokenizer cuts words only at spaces
    messages = [*CHAT, {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]
    sandbox = Sandbox(PLAIN_TEMPLATE, "T", None, RenderLimits())
    whole, prompt = (Renderer(sandbox, messages, None, variables).render(cut) for cut in (Cut(4, False), Cut(1, True)))
    assert whole == "<s> ### user\na\n\n### assistant\nb </s>\n\n### user\nc\n\n### assistant\nd </s>"
    assert prompt == "<s> ### user\na\n\n### assistant\n"
    ids = load_tokenizer(word_tokenizer).encode_with_offsets(str(whole), special_tokens=True).ids
    assert ids == encoder(chat_template="plain").encode({"messages": messages}).ids.tolist()
