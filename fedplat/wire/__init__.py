"""The protocol of both ends of a connection: the generated stubs (`v1`) and a few constants."""

from typing import Final

PROTOCOL_VERSION: Final = 1
"""The protocol version of this code; calls that begin an exchange carry it."""

OLDEST_PROTOCOL_VERSION: Final = 1
"""The oldest protocol version of clients that a server of this code serves: that of the previous release."""

METADATA_AUTHORIZATION: Final = "authorization"
"""Metadata key of every call of an operator; its value is `Bearer <token>`."""

METADATA_RETRY: Final = "fedplat-retry-s"
"""Trailing metadata key of a temporary refusal: when to retry, `<earliest> <latest>` in seconds from now."""

CHUNK_BYTES: Final = 2**20
"""Size of the largest chunk that a client sends, in bytes. A server sends twice as much if the line is fast."""

UPLOAD_CHUNK_BYTES: Final = 2**18
"""Size of the first chunk that a client sends, in bytes: on a slow line, a chunk must arrive before the line breaks."""

INLINE_BYTES: Final = 256 * 2**10
"""Size of the largest update that may be sent with its report, in bytes: for small ones an upload costs too much."""

FIRST_BACKOFF_S: Final = 0.5
MAX_BACKOFF_S: Final = 30.0
"""Default back-off of a client: the n-th delay is uniform in [0, min(max, first * 2^n)] seconds."""

INLINE_MODEL_BYTES: Final = 64 * 2**10
"""Size of the largest model sent with an assignment, in bytes: a thousand clients get their assignments at once."""

MAX_REQUEST_BYTES: Final = CHUNK_BYTES + 128 * 2**10
"""Size of the largest message that a server accepts, in bytes: a chunk or a job file, with its other fields."""

MAX_MESSAGE_BYTES: Final = 8 * 2**20
"""Size of the largest message that a client accepts, in bytes."""

CHANNEL_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # All callers retry themselves. With gRPC's own retries a call that starts while the server stops may stay pending
    # forever, without a connection and without an error (grpcio 1.85.1: 1 of about 50 such calls).
    ("grpc.enable_retries", 0),
)
"""Options of every channel to a server."""
