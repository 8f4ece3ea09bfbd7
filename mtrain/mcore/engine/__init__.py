"""One step: schedule, reduction of loss pairs, finalized gradients, optimizer."""
