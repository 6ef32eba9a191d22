"""The simulation file, its options, and the model that clients train."""
