"""One checkpoint's bytes: tensors, metadata, training state; written and read without running what is inside."""
