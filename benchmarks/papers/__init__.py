"""Every number of four papers beside ours, by simulation."""
