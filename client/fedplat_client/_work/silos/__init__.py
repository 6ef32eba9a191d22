"""The client's part in decentralised jobs: the model of its silo, the exchange of models, and rings."""
