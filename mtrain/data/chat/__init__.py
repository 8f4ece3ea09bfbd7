"""Conversations in the model's own format: its template, rendered within limits, and what of it is in the loss."""
