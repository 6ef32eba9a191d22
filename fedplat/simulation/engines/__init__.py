"""Training engines: ways to train simulated clients that give the same weights (extra "torch").

`loop` is what the others are compared with; `resident` is what trains, in whatever process.
"""
