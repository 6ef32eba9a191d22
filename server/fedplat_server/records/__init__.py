"""Records and rules of the server's own concepts: operators, the audit log, the lease of the leader. Pure."""
