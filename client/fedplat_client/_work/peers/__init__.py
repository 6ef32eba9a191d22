"""The exchange of files between clients: a listener that offers files to neighbours, and fetches from theirs."""
