"""Conversations in the model's own format: the template, rendered within limits, and the parts that are in the loss."""
