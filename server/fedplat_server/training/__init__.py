"""Training and evaluation on the server's own data, in separate processes."""
