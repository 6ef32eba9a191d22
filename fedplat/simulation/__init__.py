"""Simulation: whole fleets in virtual time, on the coordinator that runs in production.

Read `ports` first: what the parts are. `simulate` has the record of a simulation and the call that runs it, `driver`
the loop, `idle` the clients without work and `tasks` those at work, `agenda` what will happen when, `learning` what
becomes of models (`training` where there are none), `tally` and `result` the numbers, `fleet` what clients are like.
"""
