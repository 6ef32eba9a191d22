"""Records and rules of the server's own nouns: operators, the audit log, the lease of the leader. Pure."""
