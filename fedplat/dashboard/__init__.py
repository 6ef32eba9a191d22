"""The dashboard: pages of a server, or of the run folder of a simulation, in a browser (extra "dashboard").

It is a client of the admin API and never part of the daemon. Read `source.py` (the data of the pages), `routes.py` (the
addresses), one of `pages/`, then `app.py` (sessions, live updates and actions).
"""
