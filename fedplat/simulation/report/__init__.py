"""What a researcher gets of a run: numbers as JSON, pictures, and event files for TensorBoard."""
