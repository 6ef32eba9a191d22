"""Random secrets that the server issues, and the hashes that it stores."""

from __future__ import annotations

import secrets
from hashlib import sha256
from uuid import uuid4


def hash_secret(secret: str) -> bytes:
    """Return the hash that the database stores of a token. Tokens are random, so a plain hash is enough."""
    return sha256(secret.encode()).digest()


def new_token() -> tuple[str, bytes]:
    """Return a new secret of 256 random bits, and its hash."""
    secret = secrets.token_urlsafe(32)
    return secret, hash_secret(secret)


def new_id(kind: str) -> str:
    """Return a new random id of a job ("j"), a webhook ("w") or something else."""
    return f"{kind}-{uuid4().hex[:12]}"
