"""What both ends of a connection agree on: the generated stubs (`v1`) and a few constants."""

from typing import Final

PROTOCOL_VERSION: Final = 1
"""The version that this code speaks; calls that begin something carry it."""

METADATA_AUTHORIZATION: Final = "authorization"
"""Metadata key of every call of an operator; its value is `Bearer <token>`."""

METADATA_RETRY: Final = "fedplat-retry-s"
"""Trailing metadata key of a refusal that may pass: when to come back, `<earliest> <latest>` in seconds from now."""

CHUNK_BYTES: Final = 2**20
"""Size of a chunk that a server sends, and of the largest that a client sends, in bytes."""

UPLOAD_CHUNK_BYTES: Final = 2**18
"""Size of the first chunk that a client sends, in bytes: a slow line needs to finish one before it breaks."""

INLINE_BYTES: Final = 256 * 2**10
"""Largest update that may travel with its report, in bytes: for small ones an upload costs more than it saves."""

FIRST_BACKOFF_S: Final = 0.5
MAX_BACKOFF_S: Final = 30.0
"""How a client backs off by default: the n-th delay is uniform in [0, min(max, first * 2^n)] seconds."""

INLINE_MODEL_BYTES: Final = 64 * 2**10
"""Largest model that travels with an assignment, in bytes: a cohort of a thousand gets its assignments at once."""

MAX_REQUEST_BYTES: Final = CHUNK_BYTES + 128 * 2**10
"""Largest message that a server accepts, in bytes: a chunk or a job file, and what goes with it."""

MAX_MESSAGE_BYTES: Final = 8 * 2**20
"""Largest message that a client accepts, in bytes."""
