"""Configuration: every knob once, read before torch is loaded."""

from mtrain.config.schema.root import Config
from mtrain.config.schema.section import Section

__all__ = ["Config", "Section"]
