"""A model that was trained on several kinds of answers, exported and asked by transformers gives each one and stops."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from mtrain.arch.layout import Layout
from mtrain.convert.exporting import export_hf
from mtrain.hf.configuration import load_config
from tests.data.chat.cases import TOOL, assistant, user, write_tokenizer
from tests.pool import Pool
from tests.training.one_process import train_fresh

VOCABULARY = 512
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
TEMPLATE = (
    "{% for t in tools or [] %}<|system|>{{ t.function.name }}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}</tool_call>{% endfor %}"
    "{% elif m.role == 'tool' %}<|observation|>{{ m.content }}{% else %}<|user|>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A template that opens messages and closes none."""


def call(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": {}}}


CONVERSATIONS: list[dict[str, Any]] = [
    {"messages": [user("hello"), assistant("hi"), user("more"), assistant("yes", reasoning_content="why not")]},
    {
        "tools": [TOOL],
        "messages": [
            *(user("warm?"), assistant("", tool_calls=[call("get_weather")])),
            *({"role": "tool", "content": "21"}, assistant("it is"), user("thanks")),
        ],
    },
    {
        "tools": [TOOL],
        "messages": [user("both?"), assistant("so", tool_calls=[call("get_weather"), call("get_time")])],
    },
]


def test_each_kind_of_answer_is_given_and_ends(pool: Pool, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    write_tokenizer(folder)
    named = {"eos_token": "<|endoftext|>", "pad_token": "<pad>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    torch.manual_seed(3)
    config = LlamaConfig(**SIZES, vocab_size=VOCABULARY, eos_token_id=5, bos_token_id=None, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(each) + "\n" for each in CONVERSATIONS))
    data = {"kind": "sft", "seq_length": 64, "tokenizer": str(folder), "cache_dir": str(tmp_path / "cache")}
    content = {
        "run": {"dir": str(tmp_path / "run")},
        "model": {"hf": str(folder)},
        "train": {"global_batch_size": 3, "micro_batch_size": 3, "num_steps": 50, "precision": "fp32"},
        "optimizer": {"lr": 1e-2, "schedule": "constant"},
        "data": {**data, "train": [{"path": str(tmp_path / "chat.jsonl")}]},
        "metrics": {"tensorboard": False},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(content))
    pool.run(train_fresh, Layout(), load_config([tmp_path / "run.yaml"]))
    export_hf(tmp_path / "run", tmp_path / "out", None, None, num_workers=1)
    theirs = AutoTokenizer.from_pretrained(str(tmp_path / "out"))
    model = AutoModelForCausalLM.from_pretrained(str(tmp_path / "out"), dtype=torch.float32)
    stops, ends = {"<|endoftext|>", "<|user|>", "<|observation|>"}, set[str]()
    for record in CONVERSATIONS:
        for number, message in enumerate(record["messages"]):
            if message["role"] != "assistant":
                continue
            given = {"tools": record.get("tools"), "return_dict": False}
            ids = theirs.apply_chat_template(record["messages"][:number], add_generation_prompt=True, **given)
            answered = theirs.apply_chat_template(record["messages"][: number + 1], **given)
            asked = torch.tensor([ids])
            said = model.generate(
                asked, attention_mask=torch.ones_like(asked), max_new_tokens=40, do_sample=False, pad_token_id=2
            )[0].tolist()
            assert said[:-1] == answered, theirs.decode(said)
            ends.add(theirs.decode(said[-1:]))
    assert ends == stops, "each end was met"
