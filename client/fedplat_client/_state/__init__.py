"""What a client keeps on its disk: identity, models, client state, residuals, the privacy ledger."""
