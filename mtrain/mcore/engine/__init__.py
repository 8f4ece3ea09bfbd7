"""One step: schedule, reduction of loss pairs, final gradients, optimizer."""
