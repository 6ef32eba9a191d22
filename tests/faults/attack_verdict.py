"""The verdict on a soak with attackers: its bounds, what was beyond them, and tables for people."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator

import msgspec
from rich.table import Table

from faults.soak import MAX_GROWTH, MAX_MORE_FILES
from support import transports

ROUNDS_AFTER = 3
"""Committed rounds that must follow when the attackers have left."""
MAX_MORE_RSS_MB = 160.0
"""Above the calm phase, for all attackers together; the anonymous ones may cost 50 MB of it."""
MAX_DATABASE_MB_PER_MINUTE = 4.0
"""Beyond what the honest rounds take by the measure of the calm phase; a WAL of `DATABASE_SLACK_MB` is not counted."""
DATABASE_SLACK_MB = 8.0
HONEST_ROUND_MB = 0.2
"""The most that an honest round may claim of it: a WAL that grows in a short calm phase is not the rounds' doing."""
MAX_AUDIT_ROWS_PER_MINUTE = 30.0
AUDIT_SLACK = 60
MAX_WEIGHT = 10.0
"""The most that one client's weight is of the median, by default."""
MAX_FINAL_ERROR = 0.05


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is to be run. `attack_s` is None for attackers that make a few calls each, and no verdict on growth."""

    clients: int
    kinds: tuple[str, ...]
    attack_s: float | None
    calm_s: float
    database: str | None = None
    transport: transports.Name = "grpc"

    @property
    def goal(self) -> int:
        """With over-selection, half of the honest clients: attackers are drawn now and then, and rounds have room."""
        return 2 * self.clients // 5 if self.attack_s is not None else 7

    @property
    def min_fraction(self) -> float:
        """The default; but of few clients half may be attackers, whose reports are refused."""
        return 0.8 if self.attack_s is not None else 0.5

    @property
    def work_s(self) -> float:
        """How long a training takes at most; so long that many clients leave the host idle most of the time."""
        return 3.0 if self.attack_s is not None else 0.5

    @property
    def max_error(self) -> float:
        """What one client with the largest weight makes of the model when it reports the opposite of it."""
        return 2.0 * MAX_WEIGHT / (0.8 * self.goal + MAX_WEIGHT - 1.0) + 0.1


def problems_of(result: dict[str, object], plan: Plan) -> list[str]:
    """Why the soak has failed, if it has."""
    r: dict[str, float] = {name: value for name, value in result.items() if isinstance(value, (int, float))}
    minutes = r["attacked_minutes"]
    checks = {
        f"{r['abandoned']} attempts were abandoned: {result['reasons']}": r["abandoned"] != 0,
        f"{r['honest_lost']} honest assignments were lost: {result['first_lost']}": r["honest_lost"] > 0,
        "no round was committed beside the attackers": r["attacked_rounds"] < 1,
        f"fewer than {ROUNDS_AFTER} rounds were committed after them": not result["recovered"],
        f"the model was {r['max_error']:.3g} of its norm from the true one; at most {plan.max_error:.2f}": not (
            r["max_error"] <= plan.max_error
        ),
        f"the last model is {r['final_error']:.3g} of its norm from the true one": not (
            r["final_error"] <= MAX_FINAL_ERROR
        ),
        f"memory rose from {r['rss_calm_mb']} to {r['rss_most_mb']} MiB": r["rss_most_mb"]
        > r["rss_calm_mb"] + MAX_MORE_RSS_MB,
        f"{r['database_mb_by_attackers']} MiB more in the database": r["database_mb_by_attackers"]
        > DATABASE_SLACK_MB + minutes * MAX_DATABASE_MB_PER_MINUTE,
        f"{r['audit_rows']} rows more in the audit log": r["audit_rows"]
        > AUDIT_SLACK + minutes * MAX_AUDIT_ROWS_PER_MINUTE,
        f"{r['clients_ended']} processes of honest clients ended": r["clients_ended"] > 0,
        "verify found something, see above": r["verify"] != 0,
    }
    found = [text for text, wrong in checks.items() if wrong]
    for name in ("unreadable", "log_failures", "operator_failures"):
        found += [f"{name}: {text}" for text in texts(result[name])]
    for kind, done in rows(result["attackers"]).items():
        bad = [answer for answer in rows(done["answers"]) if answer in ("INTERNAL", "UNKNOWN", "CRASHED")]
        found += [f"{kind}: the answer was {answer}" for answer in bad]
    return found if plan.attack_s is None else found + lasting_problems(result)


def lasting_problems(result: dict[str, object]) -> list[str]:
    """What only a run of minutes can tell."""
    r: dict[str, float] = {name: value for name, value in result.items() if isinstance(value, (int, float))}
    found: list[str] = []
    if r["rss_last_quarter_mb"] > r["rss_second_quarter_mb"] * MAX_GROWTH:
        found.append(
            f"memory grew from {r['rss_second_quarter_mb']} to {r['rss_last_quarter_mb']} MiB beside attackers"
        )
    if r["files_last_quarter"] - r["files_second_quarter"] > MAX_MORE_FILES:
        found.append(f"open files grew from {r['files_second_quarter']:g} to {r['files_last_quarter']:g}")
    return found


def texts(value: object) -> list[str]:
    """A list of texts in a result."""
    return msgspec.convert(value, list[str])


def rows(value: object) -> dict[str, dict[str, float]]:
    """A table in a result."""
    return value  # pyright: ignore[reportReturnType]


def tables(result: dict[str, object]) -> Generator[Table]:
    """What attackers did, and what honest clients waited for."""
    table = Table("attacker", "calls", "answers")
    for kind, done in rows(result["attackers"]).items():
        answers = rows(done["answers"])
        table.add_row(kind, str(done["calls"]), ", ".join(f"{name} {count}" for name, count in answers.items()))
    yield table
    table = Table("median", "calm (s)", "attacked (s)", "times")
    for what, times in rows(result["latency"]).items():
        table.add_row(what, str(times["calm_s"]), str(times["attacked_s"]), str(times["count"]))
    yield table
