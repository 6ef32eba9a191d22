"""The services that run jobs: the coordinator's runner, long polls, budgets, revocation and retention."""
