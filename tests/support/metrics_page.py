"""The table of metrics in docs/operations.md, made from the catalogue.

    python tests/support/metrics_page.py docs/operations.md

writes it between `<!-- metrics -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from fedplat_server.instruments import METRICS

_PLACE = re.compile(r"(<!-- metrics -->\n).*?(<!-- end -->)", re.DOTALL)


def render() -> str:
    """Return the table of all metrics in Markdown."""
    rows = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    for metric in METRICS.values():
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        rows.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.text.rstrip('.')} |")
    return "\n".join(rows)


def update(page: str) -> str:
    """Return a page with the current table."""
    return _PLACE.sub(lambda match: f"{match[1]}\n{render()}\n\n{match[2]}", page)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(update(path.read_text("utf-8")), "utf-8")
