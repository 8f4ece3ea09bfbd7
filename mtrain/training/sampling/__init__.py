"""Text from a model: drawing tokens, on any layout; prompts; samples while a run trains."""
