"""The metrics of a daemon for Prometheus, with a Grafana dashboard and alert rules in `grafana/`.

`service` is the part of the daemon, with its HTTP port. At each scrape `collector` reads the state of the
coordinator and of other parts; `job_series` follows the stored changes of jobs. Privacy losses are
computed in the background.
"""
