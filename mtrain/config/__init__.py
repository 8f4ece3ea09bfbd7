"""Configuration: every knob once, read before torch is loaded."""

from mtrain.config.root import Config
from mtrain.config.section import Section

__all__ = ["Config", "Section"]
