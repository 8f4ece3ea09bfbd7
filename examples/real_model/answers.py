"""Asks what a run exported, without mtrain: `python answers.py MERGED BASE ADAPTER QUESTIONS`.

transformers loads the merged model, PEFT the adapter on top of the model that training began with.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer


def answer(model: Any, tokenizer: Any, question: str) -> str:
    """Answers with the likeliest tokens."""
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**prompt, max_new_tokens=40, do_sample=False)[0]
    return str(tokenizer.decode(ids[prompt["input_ids"].shape[1] :], skip_special_tokens=True))


def main() -> None:
    """Prints each question with both answers; exits with 1 if any differ."""
    merged_folder, base, adapter, questions = sys.argv[1:]
    tokenizer = AutoTokenizer.from_pretrained(merged_folder)
    merged = AutoModelForCausalLM.from_pretrained(merged_folder, dtype=torch.float32)
    frozen = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(frozen, adapter)
    differ = False
    for question in Path(questions).read_text().splitlines():
        said = [answer(model, tokenizer, question) for model in (merged, adapted)]
        differ |= said[0] != said[1]
        print(f"> {question}\ntransformers, merged: {said[0]}\nPEFT, adapter:        {said[1]}\n")
    sys.exit("error: the merged model and the adapter answer differently" if differ else 0)


if __name__ == "__main__":
    main()
