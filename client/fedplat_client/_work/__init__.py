"""Running an assignment: download, training, encoding, heartbeats, upload and report."""
