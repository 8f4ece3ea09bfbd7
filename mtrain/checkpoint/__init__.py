"""Checkpoints as folders: publishing, verifying and deleting them, and the format of their files.

Functions raise DataError where a checkpoint is damaged, would run code, or is of another model, and MachineError where
the disk refuses; collective ones do so on all ranks, and a load may leave the model half overwritten then.
"""
