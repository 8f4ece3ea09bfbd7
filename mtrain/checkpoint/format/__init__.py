"""Files of one checkpoint: tensors, metadata and training state; reading them runs no code from them."""
