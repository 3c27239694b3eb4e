"""Seconds of every layer, stage and slice, as the run itself shows them."""
