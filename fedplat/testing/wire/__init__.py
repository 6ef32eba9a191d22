"""Conformance of clients in any language: a scripted server of `docs/protocol.md`, and the cases that it plays.

`fleet` is the server as a pure machine, `cases` has the cases as data, `http_serving` and `grpc_serving` are its ports,
and `run` starts a client's command for each case.
"""
