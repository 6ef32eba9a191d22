"""Runs every test that proves a row of the fault table, and prints the table.

    python tests/faults/run.py [--write] [options of pytest]

Exits with 1 if a row failed or has no test. `--write` puts the table, with its date, into docs/reliability.md.
"""

from __future__ import annotations

import datetime
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from faults import table

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reliability.md"


def main(arguments: list[str]) -> int:
    """Runs the tests; the exit status."""
    write = "--write" in arguments
    tally = table.Tally()
    options = [argument for argument in arguments if argument != "--write"]
    status = pytest.main(["-m", "fault", "--rootdir", str(ROOT), str(ROOT / "tests"), *options], plugins=[tally])
    proofs = list(tally.proofs.values())
    print("\n".join(["", *table.lines(proofs)]))
    if write:
        PAGE.write_text(table.page(PAGE.read_text("utf-8"), proofs, datetime.date.today()), "utf-8")
    return 0 if tally.is_complete and status == pytest.ExitCode.OK else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
