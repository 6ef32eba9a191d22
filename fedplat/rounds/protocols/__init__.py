"""The kinds of jobs and attempts: one record of pure functions for each (`base.RoundProtocol`), in one file each.

`registry` has all of them. No other module of the coordinator asks which kind a job has.
"""
