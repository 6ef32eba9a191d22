"""Webhooks: requests to allowed addresses, and the background task that delivers events."""
