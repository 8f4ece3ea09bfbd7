"""Describes Hugging Face models without torch: config.json, tables of tensors, families."""
