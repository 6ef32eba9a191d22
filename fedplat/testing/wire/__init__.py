"""Conformance of clients in any language: a scripted server of `docs/protocol.md`, and the cases that it plays.

`fleet` is the server as a pure machine, `cases` has the cases as data, `serving` is its port of HTTP/1.1, and `run`
starts a client's command for each case.
"""
