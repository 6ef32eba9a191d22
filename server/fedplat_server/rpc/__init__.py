"""Thin gRPC handlers: decode, call the service, encode."""
