"""Training engines: ways to train simulated clients that return the same weights (extra "torch").

The engine `loop` (`processes`) is the reference that tests compare the others with; `client_trainer` trains clients in
every process.
"""
