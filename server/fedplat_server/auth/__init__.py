"""Who calls: enrollment, sessions, signatures and certificates. `fedplat.auth` has what clients share of it.

`replay_window`, `challenges` and `sessions` are pure: time and randomness are arguments. `client_directory` caches the
clients, `enrollment` admits new ones, `authentication` finds the client that makes a call, `certificates` signs and
reads those for TLS, `ca` and `pki_folder` are the server's own authority, `rate_limits` bounds what a caller may use.
"""
