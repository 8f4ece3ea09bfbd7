"""`mtrain tokenize` by its name of 0.1.0: python tools/tokenize_corpus.py book.txt pages/ --tokenizer my.model ..."""

import typer

from mtrain.cli.text import tokenize

if __name__ == "__main__":
    typer.run(tokenize)
