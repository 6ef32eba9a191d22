"""Training and evaluation on the server's own data, in processes of their own."""
