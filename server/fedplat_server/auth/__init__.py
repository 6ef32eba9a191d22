"""Client identity: enrollment, sessions, signatures and certificates. `fedplat.wire.auth` has what clients share.

`authentication` identifies the client that makes a call; its windows, challenges and sessions are pure: time and
randomness are arguments. `client_directory` caches the clients and admits new ones, `tls` has the server's
certificates, and signs and reads those of clients, `pki_folder` is the server's own authority, `rate_limits` limits
each caller.
"""
