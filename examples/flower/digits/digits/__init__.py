"""A Flower app with PyTorch: handwritten digits of scikit-learn."""
