"""The client's halves of the kinds of jobs: what a client does with an assignment (`registry`)."""
