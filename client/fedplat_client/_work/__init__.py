"""Work on an assignment: download, training, encoding, heartbeats, upload and report."""
