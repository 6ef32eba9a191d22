"""What drives the jobs: the runner of the coordinator, long polls, budgets, revocation, retention."""
