"""Configuration of a run: each key is defined once and read before torch is loaded."""

from mtrain.config.schema.root import Config
from mtrain.config.schema.section import Section

__all__ = ["Config", "Section"]
