"""Model families: for each the fields of config.json and the table of tensors."""
