"""What a simulation records: the replay log, checkpoints, statistics, and the result."""
