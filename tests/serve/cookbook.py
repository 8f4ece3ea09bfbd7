"""Recipes of tinker_cookbook, unmodified, on data and a model of this machine: their own loops as programs."""

from __future__ import annotations

import json
import os
import random
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.paths import ROOT
from tests.real_model.smollm2 import conversations, write_tiny_gguf
from tests.tools.wheels import CACHE_OF_USER

VERSION = "0.6.1"
NEEDED = ["aiohttp", "blobfile", "chz", "cloudpickle", "pyrage", "tiktoken", "termcolor"]
NEEDED += ["math-verify", "pylatexenc", "sympy"]  # of rl_loop, whose answers are numbers
"""What the recipes import and the suite does not have. tinker_cookbook also names tml-renderers>=0.4.1, which PyPI does
not have and only Inkling models need, so pip cannot install it with all that it names."""
MODEL = "meta-llama/Llama-3.2-1B"
"""Name by which the recipes choose a renderer (`User: ...`, `Assistant: ...`); here a folder with a tiny model."""
SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
EXAMPLE = (
    f"User: How many r's are in strawberry?{SUFFIX}\n\nAssistant: Let's spell the word out and number all the letters: "
    "1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r 10) y. We have r's at positions 3, 8, and 9. \\boxed{3}\n\nUser: "
)
"""Begin of every prompt of rl_loop."""
LONGEST = 4096
"""Positions of the model of rl_numerics_check, whose prompts have 2,000 tokens."""
KEY = "tml-of-the-tests-0123456789"


def cookbook() -> Path:
    """Returns a folder to import tinker_cookbook from: MTRAIN_COOKBOOK, else one that pip fills once."""
    if named := os.environ.get("MTRAIN_COOKBOOK"):
        return Path(named)
    folder = CACHE_OF_USER / "mtrain-tests" / f"tinker-cookbook-{VERSION}"
    if not (folder / "complete").exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--target", str(folder)]
        subprocess.run([*pip, "--no-deps", f"tinker-cookbook=={VERSION}"], check=True)
        subprocess.run([*pip, *NEEDED], check=True)
        (folder / "complete").touch()
    return folder


def write_model(folder: Path, seed: int = 0) -> None:
    """Writes a llama of two layers with a tokenizer of bytes, which answers a sum with any digit, in a box."""
    tokenizer, model = _untrained(folder, 1024, seed)
    optimizer, rng = torch.optim.AdamW(model.parameters(), 3e-3), random.Random(seed)
    for _ in range(160):
        sums = [f"{EXAMPLE}{sum_of(rng)[0]}{SUFFIX}\n\nAssistant: \\boxed{{{rng.randint(2, 9)}}}" for _ in range(4)]
        names = [
            f"User: Who are you?\n\nAssistant: {rng.choice(['Me.', 'A llama.', 'A llama of bytes.'])}" for _ in range(2)
        ]
        rows = [tokenizer.encode(f"{each}\n\nUser:", add_special_tokens=False) for each in (*sums, *names)]
        width = max(map(len, rows))
        labels = torch.tensor([row + [-100] * (width - len(row)) for row in rows])
        model(input_ids=labels.clamp(min=0), labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)


ASKED_ABOUT = ("training/rl.md", "training/serve.md", "data/finetuning.md")
"""Pages that the reader is asked about."""


def write_reader(folder: Path, seed: int = 0) -> None:
    """Writes such a model that calls a tool to read a page, or answers, whatever it was asked."""
    tokenizer, model = _untrained(folder, LONGEST, seed)
    optimizer, rng = torch.optim.AdamW(model.parameters(), 3e-3), random.Random(seed)
    asked = "".join((ROOT / "docs" / name).read_text() for name in ASKED_ABOUT)
    for _ in range(200):
        ids, labels = [list[int]() for _ in range(2)], [list[int]() for _ in range(2)]
        for row, learned in zip(ids * 4, labels * 4):
            start = rng.randrange(len(asked) - 900)
            call = json.dumps({"name": "read_page", "arguments": {"page": rng.randint(1, 2)}})
            said = f"<tool_call>\n{call}\n</tool_call>" if rng.random() < 0.6 else f"Answer: {rng.randint(0, 3)}"
            before = f"{asked[start : start + rng.randint(50, 850)]}<|im_end|>\n<|im_start|>assistant\n"
            parts = [tokenizer.encode(each, add_special_tokens=False) for each in (before, f"{said}<|im_end|>")]
            row += [*parts[0], *parts[1]]
            learned += [-100] * len(parts[0]) + parts[1]
        width = max(map(len, ids))
        padded = [
            torch.tensor([row + [filler] * (width - len(row)) for row in rows])
            for rows, filler in ((ids, 0), (labels, -100))
        ]
        model(input_ids=padded[0], labels=padded[1]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)


def _untrained(folder: Path, positions: int, seed: int) -> tuple[Any, LlamaForCausalLM]:
    """Writes a tokenizer of bytes; returns it, and a llama of two layers with that number of positions."""
    folder.mkdir(parents=True)
    gguf = folder / "tiny.gguf"
    write_tiny_gguf(gguf)
    runpy.run_path(str(ROOT / "examples" / "real_model" / "fetch.py"))["write_hf_folder"](gguf, folder)
    gguf.unlink()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = {"vocab_size": len(tokenizer), "max_position_embeddings": positions, "bos_token_id": 1, "eos_token_id": 2}
    return tokenizer, LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, tie_word_embeddings=True, **sizes, **tokens))


def sum_of(rng: random.Random) -> tuple[str, int]:
    """Draws a question and its answer of one digit."""
    first, second = rng.randint(1, 5), rng.randint(1, 4)
    return f"What is {first} + {second}?", first + second


def write_data(folder: Path) -> None:
    """Writes data sets under the names by which the recipes load them, which `datasets` finds in the working folder."""
    chats = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in conversations()
    ]
    _write(folder / "HuggingFaceH4" / "no_robots", {"train": chats, "test": chats[:4]})
    rng = random.Random(1)
    sums = [sum_of(rng) for _ in range(24)]
    answered = [{"question": question, "answer": f"#### {answer}"} for question, answer in sums]
    _write(folder / "openai" / "gsm8k", {"train": answered, "test": answered[:2]}, "main")
    lines = [{"text": f" {question} {answer} \n"} for question, answer in conversations()]
    _write(folder / "Salesforce" / "wikitext", {"train": lines * 4}, "wikitext-103-raw-v1")
    pairs = [
        {
            name: f"\n\nHuman: {question}\n\nAssistant: {text}"
            for name, text in (("chosen", answer), ("rejected", "No."))
        }
        for question, answer in conversations()
    ]
    # the recipe takes 1,024 for its test, and leaves out what is no conversation
    nothing = {"chosen": "", "rejected": ""}
    _write(folder / "Anthropic" / "hh-rlhf", {"train": pairs, "test": [*pairs[:4], *[nothing] * 1020]})


def _write(folder: Path, splits: dict[str, list[dict[str, Any]]], name: str = "default") -> None:
    folder.mkdir(parents=True)
    files = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in splits)
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: {name}\n  data_files:\n{files}---\n")
    for split, rows in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def shown() -> dict[str, list[str]]:
    """Returns the options of each recipe's command in docs/training/serve.md."""
    page = (ROOT / "docs" / "training" / "serve.md").read_text()
    (block,) = [each for each in re.findall(r"```bash\n(.*?)```", page, re.DOTALL) if "tinker_cookbook" in each]
    commands = [shlex.split(each) for each in block.replace("\\\n", "").splitlines() if each.startswith("python -m ")]
    return {module.removeprefix("tinker_cookbook.recipes."): options for _, _, module, *options in commands}


def run_recipe(folder: Path, address: str, recipe: str, options: Sequence[str]) -> list[dict[str, Any]]:
    """Runs `python -m tinker_cookbook.recipes.RECIPE` to its end; returns what it logged, a step each."""
    line = [sys.executable, "-W", "ignore", "-m", f"tinker_cookbook.recipes.{recipe}", *options]
    (log,) = [each.removeprefix("log_path=") for each in options if each.startswith("log_path=")]
    environment = {
        **os.environ,
        "PYTHONPATH": str(cookbook()),
        "OMP_NUM_THREADS": "1",
        "TINKER_BASE_URL": address,
        "TINKER_API_KEY": KEY,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "hf"),
    }
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    return [json.loads(each) for each in (folder / log / "metrics.jsonl").read_text().splitlines()]
