"""What clients of each kind of job do over time in a simulation: one behaviour for each (`base.ClientBehaviour`).

`registry` has the table of all kinds. The driver and what runs it never ask for the kind of a job.
"""
