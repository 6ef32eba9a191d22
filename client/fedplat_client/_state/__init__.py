"""The files of a client: identity, models, client state, residuals and the privacy ledger."""
