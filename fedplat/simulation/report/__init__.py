"""Reports of a run for people: summaries, plots, and event files for TensorBoard."""
