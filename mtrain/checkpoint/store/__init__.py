"""The folder of checkpoints: publishes, verifies, keeps and deletes them."""
