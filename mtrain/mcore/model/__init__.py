"""This rank's part of the model, of megatron-core's layers and of ours where theirs are wrong."""
