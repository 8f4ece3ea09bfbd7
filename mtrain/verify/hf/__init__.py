"""Check `mtrain verify hf`: compares steps with the same steps in transformers."""
