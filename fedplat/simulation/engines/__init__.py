"""Training engines: ways to train simulated clients that return the same weights (extra "torch").

`loop` is the reference that tests compare the others with; `client_trainer` trains clients in every process.
"""
