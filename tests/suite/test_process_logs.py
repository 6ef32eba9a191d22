"""The report of a failed test has what the processes wrote during it."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import process_logs


def test_what_processes_wrote_during_the_test_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_logs, "_begins", {})
    first, second, gone = tmp_path / "first.log", tmp_path / "second.log", tmp_path / "gone.log"
    with process_logs.open_log(first) as log:
        log.write(b"in an earlier test\n")
    process_logs.open_log(gone).close()
    gone.unlink()
    process_logs.begin_test()
    assert process_logs.sections() == []
    with process_logs.open_log(first) as log, process_logs.open_log(second) as other:
        log.write(b"now\n")
        other.write(b"x" * process_logs.SHOWN_BYTES + b"end")
    second_end = "x" * (process_logs.SHOWN_BYTES - 3) + "end"
    folder = tmp_path.name
    assert process_logs.sections() == [(f"{folder}/first.log", "now\n"), (f"{folder}/second.log", second_end)]


def test_a_failed_report_has_the_sections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_logs, "_begins", {})
    log = tmp_path / "server.log"
    process_logs.show_log(log)
    log.write_text("the reason")
    for outcome, sections in (("passed", []), ("failed", [(f"{tmp_path.name}/server.log", "the reason")])):
        report = pytest.TestReport("test", ("", None, ""), {}, outcome, None, "call")  # pyright: ignore[reportArgumentType]
        hook = process_logs.pytest_runtest_makereport()
        next(hook)
        with pytest.raises(StopIteration):
            hook.send(report)
        assert report.sections == sections
