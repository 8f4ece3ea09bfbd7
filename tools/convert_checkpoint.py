"""`mtrain convert` by its name of 0.1.0: python tools/convert_checkpoint.py import --hf DIR --out DIR"""

from mtrain.cli.convert import convert_app

if __name__ == "__main__":
    convert_app(prog_name="convert_checkpoint.py")
