"""What `topology="auto"` takes to measure a machine, and how near it comes to a thorough calibration."""
