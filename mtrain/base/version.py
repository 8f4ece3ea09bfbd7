"""Version of this program, and the folder of its package."""

from pathlib import Path

__version__ = "0.2.0"
PACKAGE_FOLDER = Path(__file__).parents[1]
