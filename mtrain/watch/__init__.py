"""The watchdog: one process a node that sees which rank is silent, says where it stands, and ends the job."""
