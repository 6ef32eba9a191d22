"""What needs a GPU, measured in one command without a network (`run.py`)."""
