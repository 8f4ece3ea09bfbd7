"""This rank's part of the model, from megatron-core's layers and from ours where theirs are wrong."""
