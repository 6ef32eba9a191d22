"""The code that needs PyTorch: training of one client and of many at once, process groups, training on the server."""
