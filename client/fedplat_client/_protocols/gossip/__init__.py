"""The client's part in decentralised jobs: the model of its silo, the exchange of models, and rings.

`worker.py` runs an assignment: it trains the silo's model (`model.py`) and follows the server's steps (`silo_round.py`,
`calls.py`). `fetching.py` gets the models of neighbours and takes part in an all-reduce, by the ways of `network.py`,
which also lets others have the silo's model.
"""
