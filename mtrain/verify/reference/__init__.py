"""Reference for a training step in float64, written only from definitions.

From the trainer it imports only configuration, tokenizer and errors. Masks, positions, labels, weights, denominators,
losses, the model, AdamW, clipping and learning rate are written a second time in plain torch, from the law of losses
(docs/proof/same-loss-on-any-layout.md) and publications, so it reveals faults that all layouts share.
`tests/test_architecture.py` checks the imports.
"""
