"""What has left a client by month and job, the report with the fields of Art. 30 (2), and their commands."""

from __future__ import annotations

import csv
import datetime
import io
import json
import random
from pathlib import Path

import pytest
from click.testing import CliRunner

from fedplat_client import activity_report, releases
from fedplat_client._consent import decisions
from fedplat_client._state import release_summary, released
from fedplat_client._state.release_summary import sum_up
from fedplat_client._state.released import Protection, ReleaseRecord, Site
from fedplat_client.activity_report import UNKNOWN, build_report, write_markdown
from fedplat_client.commands import main
from support import owners
from support.owners import HOSTILE, MASKED, line

NOW = datetime.datetime(2026, 11, 28, 12, tzinfo=datetime.UTC)


def test_the_sums_by_month_and_job_are_those_of_the_lines() -> None:
    draw = random.Random(7)
    lines = [
        line(
            number,
            draw.choice(["one", "two"]),
            size_bytes=draw.randrange(1000),
            protection=Protection(masked=draw.random() < 0.5, min_clients=draw.randrange(2, 9)),
        )
        for number in range(2000)
    ]
    found = sum_up(lines)
    assert [each.month for each in found] == sorted((each.month for each in found), reverse=True)
    for each in found:
        own = [one for one in lines if (one.time[:7], one.job) == (each.month, each.job)]
        masked = [one for one in own if one.protection.masked]
        assert each.size_bytes == sum(one.size_bytes for one in own)
        assert (each.num_updates, each.num_masked) == (len(own), len(masked))
        assert each.min_clients == min(one.protection.min_clients for one in masked)
        assert (each.first, each.last, len(each.rounds)) == (own[0].time, own[-1].time, len(own))
    assert sum(each.num_updates for each in found) == 2000


@pytest.mark.parametrize(
    ("protections", "expected"),
    [
        ([], ""),
        ([owners.PLAIN], "none: each update was readable by itself"),
        ([MASKED, MASKED], "all masked in sums over at least 3 clients, with a noise multiplier of at least 1"),
        (
            [Protection(True, 5, 2.0), Protection(True, 4), owners.PLAIN],
            "2 of 3 updates masked in sums over at least 4 clients, without noise",
        ),
    ],
)
def test_the_protection_is_that_of_the_weakest_update(protections: list[Protection], expected: str) -> None:
    lines = [line(number, protection=each) for number, each in enumerate(protections)]
    (found,) = sum_up([*lines, line(9, content="metrics", size_bytes=0)])
    assert found.protection == expected


def test_lines_beside_which_nothing_is_sent_do_not_count() -> None:
    """The digest of an update that was computed while it was sent, and the decisions of the owner."""
    (found,) = sum_up([line(0, digest=""), line(0, content="digest"), line(0, content="decision")])
    assert found.sent == "1 update"
    assert found.size_bytes == 1000


@pytest.mark.slow
def test_a_report_has_the_fields_of_the_law_and_no_invented_content(tmp_path: Path) -> None:
    client, digests = owners.fill(tmp_path)
    record = client.released
    report = build_report(Site("s:1", "hospital", record), datetime.date(2026, 10, 1), NOW.date(), {}, NOW)
    assert [each.place for each in report.fields] == ["(a)", "(a)", "(a)", "(b)", "(c)", "(c)", "(d)"]
    known = {each.asks: each.known for each in report.fields}
    assert [known[asks] for asks in known if "processor" in asks or "protection officer" in asks] == [(), ()]
    assert {(each.month, each.job) for each in report.months} == {
        ("2026-10", "approved"), ("2026-10", "masked"), ("2026-11", HOSTILE),
    }  # fmt: skip
    assert {each.digest for each in report.months} == {digests["approved"], digests["masked"], ""}
    text = write_markdown(report)
    assert text.count(f"*{UNKNOWN}*") == sum(not each.known for each in report.fields)
    assert "unchanged and in their order" in text


def test_a_period_has_its_first_and_its_last_day(tmp_path: Path) -> None:
    record = ReleaseRecord(tmp_path / "released.jsonl")
    for number in (0, 19, 20, 39, 40):  # two on the first, two on the second, and one on the third of October
        record.add(line(number))

    def count(first: int, last: int) -> int:
        days = datetime.date(2026, 10, first), datetime.date(2026, 10, last)
        return build_report(Site("s:1", "p", record.path), *days, {}, NOW).num_lines

    assert [count(1, 1), count(2, 2), count(1, 2), count(3, 3), count(4, 30)] == [2, 2, 4, 1, 0]


def test_names_that_others_have_chosen_are_text_in_markdown(tmp_path: Path) -> None:
    record = ReleaseRecord(tmp_path / "released.jsonl")
    record.add(line(0, HOSTILE + "\n# A title\n| cell", trainer="[link](http://evil.example)"))
    report = build_report(Site("s:1", "p", record.path), datetime.date(2026, 10, 1), NOW.date(), {}, NOW)
    text = write_markdown(report)
    assert "<script" not in text.replace("\\<script", "")
    assert "\n# A title" not in text
    assert "[link](" not in text.replace("\\[link\\](", "")
    rows = [row for row in text.splitlines() if "alert" in row]
    assert rows
    assert {row.replace("\\|", "").count("|") for row in rows} <= {4, 8}
    assert not any(char in text for char in "\x1b\u202e")


def test_a_changed_record_is_named_in_the_report(tmp_path: Path) -> None:
    record = ReleaseRecord(tmp_path / "released.jsonl")
    for number in range(3):
        record.add(line(number))
    record.path.write_text(record.path.read_text().replace('"round":2', '"round":9'))
    report = build_report(Site("s:1", "p", record.path), datetime.date(2026, 10, 1), NOW.date(), {}, NOW)
    assert report.record.startswith("Line 2 of the record is not as it was written")


def test_a_part_of_a_record_is_those_lines(tmp_path: Path) -> None:
    record = ReleaseRecord(tmp_path / "released.jsonl")
    for number in range(7):
        record.add(line(number))
    assert [each.round for each in released.read_part(record.path, 2, 5)] == [3, 4, 5]
    assert list(released.read_part(tmp_path / "none", 0, 5)) == []


def test_csv_is_the_same_in_many_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [line(number, "=1+1") for number in range(50)]
    whole = "".join(releases.write_csv(lines))
    monkeypatch.setattr(releases, "_CSV_BYTES", 1)
    parts = list(releases.write_csv(lines))
    assert len(parts) > 50
    assert "".join(parts) == whole
    rows = list(csv.DictReader(io.StringIO(whole)))
    assert [row["round"] for row in rows] == [str(number + 1) for number in range(50)]
    assert rows[0]["job"] == "'=1+1"  # no formula of a spreadsheet


@pytest.mark.parametrize(
    ("limits", "problem"),
    [
        ({"max_rounds": "0"}, "no number of rounds"),
        ({"max_rounds": "-1"}, "no number of rounds"),
        ({"max_rounds": "9" * 30}, "no number of rounds"),
        ({"until": "soon"}, "no day"),
        ({"until": "2026-11-27"}, "2026-11-27 has passed"),
        ({"max_epsilon": "nan"}, "no epsilon"),
        ({"max_epsilon": "0"}, "no epsilon"),
        ({"max_epsilon": "inf"}, "no epsilon"),
    ],
)
def test_a_limit_that_is_none_is_refused(limits: dict[str, str], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        decisions.approve("now", NOW.date(), **limits)


def test_limits_become_those_of_the_decision() -> None:
    decision = decisions.approve("now", NOW.date(), max_rounds="40", until="2026-11-28", max_epsilon="1.5")
    assert list(decisions.list_limits(decision)) == ["at most 40 rounds", "until 2026-11-28", "epsilon at most 1.5"]
    assert decisions.mark(decision) != decisions.mark(decisions.refuse("revoked", "now", ""))
    for reason in ("x" * 501, "two\nlines"):
        with pytest.raises(ValueError, match="at most 500 bytes, on one line"):
            decisions.refuse("rejected", "now", reason)


# --- the command ---


def call(folder: Path, *arguments: str) -> tuple[int, str]:
    options = ("--server", "127.0.0.1:7443", "--population", "hospital", "--data-dir", str(folder))
    done = CliRunner().invoke(main, [*arguments, *options])
    return done.exit_code, done.output


@pytest.mark.slow
def test_the_command_prints_the_report(tmp_path: Path) -> None:
    _, digests = owners.fill(tmp_path)
    status, text = call(tmp_path, "report", "--from", "2026-10-01", "--to", "2026-11-30")
    assert status == 0
    assert digests["masked"] in text
    report = json.loads(call(tmp_path, "report", "--from", "2026-10-01", "--to", "2026-11-30", "--json")[1])
    assert [(each["name"], each["kind"]) for each in report["jobs"]] == [("masked", "sync"), ("approved", "sync")]
    assert [report["jobs"][1][name] for name in ("purpose", "contact")] == ["a study | <b>IRB</b>", "pi@example.org"]
    assert "purpose as stated: a study \\| \\<b\\>IRB\\</b\\>" in text
    assert "job approved: submitted by anna; contact as stated: pi@example.org; controller to be filled in" in text
    assert report["jobs"][1]["decision"] == "approved at 2026-11-01T09:00:00"
    assert call(tmp_path / "new", "report")[1].count("Nothing has left the client.") == 1


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--from", "yesterday"), "--from 'yesterday' is no day; expected one such as 2026-11-28"),
        (("--from", "2026-05-02", "--to", "2026-05-01"), "--to 2026-05-01 is before --from 2026-05-02"),
    ],
)
def test_a_wrong_period_is_a_sentence(tmp_path: Path, arguments: tuple[str, ...], problem: str) -> None:
    status, text = call(tmp_path, "report", *arguments)
    assert status != 0
    assert problem in text


def test_a_record_that_cannot_be_read_is_a_sentence(tmp_path: Path) -> None:
    client = owners.open_owner(tmp_path)
    client.load_public_key()
    client.released.write_text("no line\n")
    status, text = call(tmp_path, "report")
    assert status == 1
    assert "cannot be read" in text
    assert "move the file aside" in text


def test_a_day_is_a_day() -> None:
    assert activity_report.parse_day("2026-11-28") == datetime.date(2026, 11, 28)
    assert release_summary.describe_period(sum_up([line(0), line(20)])[0]) == "2026-10-01 to 2026-10-02"
