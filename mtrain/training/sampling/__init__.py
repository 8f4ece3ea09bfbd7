"""Text generation: drawing tokens on any layout, prompts, samples while a run trains."""
