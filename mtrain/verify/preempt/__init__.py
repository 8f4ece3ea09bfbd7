"""Check `mtrain verify preempt`: starts a small copy of the run by the real launcher and stops it by real signals."""
