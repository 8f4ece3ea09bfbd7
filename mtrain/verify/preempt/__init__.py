"""`mtrain verify preempt`: a small copy of the run, started by the real launcher and stopped by real signals."""
