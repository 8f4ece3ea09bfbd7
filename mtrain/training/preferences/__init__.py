"""Preference losses in a run: the pass that scores whole sequences, and the scores of a reference model."""
