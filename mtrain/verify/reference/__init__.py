"""Reference for a training step, in float64, from definitions alone.

Of the trainer only the configuration, the tokenizer and the errors are imported: masks, positions, labels, weights,
denominators, losses, the model, AdamW, clipping and the learning rate are written a second time, in plain torch, from
the law of losses (docs/proof/same-loss-on-any-layout.md) and from publications. So a fault of the trainer that every
layout shares shows as a difference. `tests/test_architecture.py` checks the imports.
"""
