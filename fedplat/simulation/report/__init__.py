"""Reports of a run for people: summaries, plots, and metrics for experiment trackers."""
