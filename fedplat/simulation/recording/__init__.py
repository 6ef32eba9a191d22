"""The records of a simulation: the replay log, checkpoints, statistics and the result."""
