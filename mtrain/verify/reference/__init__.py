"""Reference for a training step in float64, from definitions alone.

It imports only configuration, tokenizer and errors of the trainer. Masks, positions, labels, weights, denominators,
losses, the model, AdamW, clipping and learning rate are written a second time in plain torch, from the law of losses
(docs/proof/same-loss-on-any-layout.md) and publications, so that it shows faults that every layout shares.
`tests/test_architecture.py` checks the imports.
"""
