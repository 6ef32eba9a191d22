"""The page of a client's owner: what waits for approval, what was decided, what has left (extra "pages")."""
