"""Bad steps: detection before they are applied, skipping, rollback."""
