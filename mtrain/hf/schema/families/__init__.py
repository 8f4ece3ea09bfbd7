"""Model families, each with its fields of config.json and its table of tensors."""
