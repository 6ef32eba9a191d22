"""The consent of an owner who approves jobs: loaded only by clients with approvals, since it reads job files."""
