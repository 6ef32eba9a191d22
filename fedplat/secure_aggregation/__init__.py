"""Secure aggregation: a server learns the sum of its clients' updates, and no single update.

The protocol is that of Bonawitz et al. 2017, "Practical Secure Aggregation for Privacy-Preserving Machine Learning"
(CCS), with the graph of Bell et al. 2020, "Secure Single-Server Aggregation with (Poly)Logarithmic Overhead" (CCS), in
large groups. Read in this order: `messages.py` has the table of the job file and what participants send, `setup.py`
what all of a group agree on, and the graph, `participant.py` a client's part and `unmasking.py` the server's.
`shamir.py` and `primitives.py` are the cryptography below, `encoding.py` maps updates to integers and sums back.
Nothing here reads a clock, a socket or a file.
"""
