"""A small Llama-shaped model, and what ranks do with it, for the tests of layouts."""
