"""Watchdog: one process per node that detects a silent rank, reports where it hangs, and ends the job."""
