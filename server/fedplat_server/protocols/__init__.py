"""The server's halves of the kinds of jobs: one object for each kind (`half.ServerHalf`), in `registry.HALVES`.

They have the names of `fedplat.rounds.protocols`, which has the rules of the coordinator. Handlers and the leader ask
the half of a job or of an attempt, and never for its kind.
"""
