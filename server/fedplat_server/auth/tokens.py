"""Secrets that the server hands out, and what it keeps of them."""

from __future__ import annotations

import secrets
from hashlib import sha256


def hash_secret(secret: str) -> bytes:
    """Return what the database keeps of a token. Tokens are random, so that a plain hash is enough."""
    return sha256(secret.encode()).digest()


def new_token() -> tuple[str, bytes]:
    """Return a fresh secret of 256 random bits, and its hash."""
    secret = secrets.token_urlsafe(32)
    return secret, hash_secret(secret)
