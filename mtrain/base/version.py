"""Version of this program, and the folder of its package."""

from pathlib import Path

__version__ = "0.2.0"
PACKAGE_FOLDER = Path(__file__).parents[1]
SHARED = PACKAGE_FOLDER / "_share"
"""Shipped files: links to the originals in a checkout, the files themselves in a wheel."""
