"""Who calls: enrolment, sessions, signatures and certificates. `fedplat.identity` has what clients share of it.

`window`, `challenges` and `sessions` are pure: time and randomness are arguments. `book` remembers the clients,
`enrolment` lets new ones in, `callers` tells who makes a call, `certificates` signs and reads those for TLS.
"""
