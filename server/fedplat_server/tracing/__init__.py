"""Traces in OpenTelemetry: one for each attempt, made from stored rows when it ends, and spans of the calls.

Only `provider` and `attempt_spans` import OpenTelemetry, and only `fedplat-server run --traces` imports these.
"""
