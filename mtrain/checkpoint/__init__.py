"""Checkpoints as folders: publishing, verifying and deleting them, and the format of their files.

Functions raise DataError if a checkpoint is damaged, would run code, or belongs to another model, and MachineError if
the disk fails. Collective functions raise on all ranks; a load that fails may leave the model half overwritten.
"""
