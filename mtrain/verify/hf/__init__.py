"""`mtrain verify hf`: steps here against the same steps in transformers."""
