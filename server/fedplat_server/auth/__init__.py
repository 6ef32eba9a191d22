"""Client identity: enrollment, sessions, signatures and certificates. `fedplat.wire.auth` has what clients share.

`replay_window`, `challenges` and `sessions` are pure: time and randomness are arguments. `client_directory` caches the
clients, `enrollment` admits new ones, `authentication` identifies the client that makes a call, `certificates` signs
and reads client certificates, `ca` and `pki_folder` are the server's own authority, `rate_limits` limits each caller.
"""
