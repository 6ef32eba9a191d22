"""How a daemon is run: one frozen record for each part that needs to be told something."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec


class Limits(msgspec.Struct, frozen=True):
    """What a caller may ask for at most; the server holds these whatever a client says.

    `max_calls`: open calls of one client, of which `max_streams` may be uploads and downloads. `max_names`: trainers
    and evaluators of one client, each. `idle_s`: how long a stream that sends to the server may say nothing; in this
    time it also has to bring `min_bytes_per_s`. `requests_per_minute`: of one client, all in one burst or evenly.
    `anonymous_per_minute`: of one address, requests that are not an enrolled client's. `max_upload_factor`: how often
    a client may send the largest update that is accepted, for one attempt, because transfers broke.
    """

    max_waiting: int = 100_000
    max_wait_s: float = 300.0
    max_model_bytes: int = 64 * 2**30
    max_labels: int = 64
    max_metrics: int = 64
    max_text: int = 1000
    max_names: int = 256
    max_job_file_bytes: int = 2**20
    max_calls: int = 16
    max_streams: int = 4
    idle_s: float = 60.0
    min_bytes_per_s: float = 2048.0
    requests_per_minute: float = 6000.0
    anonymous_per_minute: float = 6000.0
    max_upload_factor: float = 4.0


class ServerConfig(msgspec.Struct, frozen=True):
    """Everything that the daemon is told when it starts.

    `listen` is `host:port` (port 0: any free one). `database` is a URL; `evaluators` maps the names that jobs use
    to `module:function` or `/path/to/file.py:function`, and one call of an evaluator may take `evaluation_s`.
    """

    listen: str
    data_dir: Path
    database: str
    evaluators: Mapping[str, str] = {}
    evaluation_s: float = 600.0
    limits: Limits = Limits()
    grace_s: float = 10.0

    @property
    def blob_dir(self) -> Path:
        """Where models lie."""
        return self.data_dir / "blobs"

    @property
    def upload_dir(self) -> Path:
        """Where updates lie until their attempt has ended."""
        return self.data_dir / "uploads"
