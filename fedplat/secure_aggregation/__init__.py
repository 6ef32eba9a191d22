"""Secure aggregation: a server learns the sum of its clients' updates, and no single update.

The protocol is that of Bonawitz et al. 2017, "Practical Secure Aggregation for Privacy-Preserving Machine Learning"
(CCS), with the graph of Bell et al. 2020, "Secure Single-Server Aggregation with (Poly)Logarithmic Overhead" (CCS), in
large groups. Read in this order: `options.py` is the table of the job file, `setup.py` what all participants of a group
agree on, `messages.py` what they send, `participant.py` a client's part and `unmasking.py` the server's. `graph.py`,
`shamir.py`, `channel.py`, `masks.py` and `primitives.py` are the cryptography below, `encoding.py` maps updates to
integers and sums back. Nothing here reads a clock, a socket or a file.
"""
