"""Watchdog: one process per node that notices a silent rank, says where it hangs, and ends the job."""
