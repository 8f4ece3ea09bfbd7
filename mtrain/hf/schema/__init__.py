"""Hugging Face models as data, without torch: config.json, tables of tensors, families."""
