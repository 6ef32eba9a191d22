"""The client's part in decentralised jobs: the model of its silo, the exchange of models, and rings.

`worker.py` runs an assignment: it trains the silo's model (`model.py`) and follows the server's steps (`silo_round.py`,
`calls.py`). `fetching.py` gets the models of neighbours, `offers.py` lets them have the silo's, `ring.py` takes part in
an all-reduce, all by the ways of `network.py`.
"""
