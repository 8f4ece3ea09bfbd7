"""`mtrain plot` by its name of 0.1.0: python tools/plot_losses.py runs/a runs/b --output losses.png"""

import typer

from mtrain.cli.pages import plot

if __name__ == "__main__":
    typer.run(plot)
