"""Model families: the fields of config.json and the table of tensors of each."""
