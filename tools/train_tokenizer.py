"""`mtrain train-tokenizer` by its name of 0.1.0: python tools/train_tokenizer.py corpus.jsonl --output my.model ..."""

import typer

from mtrain.cli.text import train_tokenizer

if __name__ == "__main__":
    typer.run(train_tokenizer)
