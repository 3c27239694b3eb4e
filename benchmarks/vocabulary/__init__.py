"""What a vocabulary split over the ranks of a pipeline gains: see README.md."""
