"""The Grafana dashboard that the server ships."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedplat_server import metrics

BOARD: dict[str, Any] = json.loads((Path(metrics.__path__[0]) / "grafana/fedplat.json").read_text())


def panels() -> list[dict[str, Any]]:
    """The panels with data."""
    return [panel for panel in BOARD["panels"] if panel["type"] != "row"]


def expressions(interval: str = "1m") -> list[str]:
    """The expressions of all panels, with Grafana's variables replaced: all jobs, and this interval for rates."""
    found = [target["expr"] for panel in panels() for target in panel["targets"]]
    return [text.replace("$__rate_interval", interval).replace("$job_name", ".*") for text in found]
