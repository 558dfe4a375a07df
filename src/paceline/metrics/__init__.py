"""Numbers and predictions over all processes: each example counts once."""
