"""Traces in OpenTelemetry: one for each attempt, made from stored rows when it ends, and spans of the calls.

Only `provider` imports OpenTelemetry, and only `fedplat-server run --traces` imports it.
"""
