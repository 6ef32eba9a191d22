"""How each invariant can be broken: the check that must find it, and the statement that breaks it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fedplat.rounds.invariants import attempts, jobs
from fedplat_server.verify import checks, files
from support.jobs import job_file, write_job


def job(name: str, values: str) -> str:
    return f"UPDATE jobs SET {values} WHERE job_id = '{{{name}}}'"


def attempt(name: str, round_: int, number: int, values: str) -> str:
    return f"UPDATE attempts SET {values} WHERE job_id = '{{{name}}}' AND round = {round_} AND number = {number}"


def assignment(name: str, round_: int, number: int, where: str, values: str) -> str:
    """Changes one of the assignments of an attempt."""
    of = f"job_id = '{{{name}}}' AND round = {round_} AND number = {number}"
    one = f"(SELECT min(client_id) FROM assignments WHERE {of} AND {where})"
    return f"UPDATE assignments SET {values} WHERE {of} AND client_id = {one}"


def version(number: int, values: str) -> str:
    return f"UPDATE model_versions SET {values} WHERE job_id = '{{done}}' AND version = {number}"


def history(where: str, values: str | None = None) -> str:
    """Changes the first row of the history that matches `where`; without values it is removed."""
    one = f"sequence = (SELECT min(sequence) FROM history WHERE job_id = '{{done}}' AND {where})"
    return f"DELETE FROM history WHERE {one}" if values is None else f"UPDATE history SET {values} WHERE {one}"


NEW_ATTEMPT = (
    "INSERT INTO attempts SELECT job_id, {round}, {number}, '{kind}', '{phase}', '', {base}, goal, minimum, target, "
    "opened_unix_s, {ended}, metrics, NULL, 0, 0, 0 FROM attempts "
    "WHERE job_id = '{{done}}' AND round = 1 AND number = 1"
)


def new_attempt(round_: int, number: int, kind: str, phase: str, base: int = 1, ended: str = "1.0") -> str:
    return NEW_ATTEMPT.format(round=round_, number=number, kind=kind, phase=phase, base=base, ended=ended)


def new_charge(name: str, version: int) -> str:
    return f"INSERT INTO ledger SELECT '{{{name}}}', {version}, {version}, mechanism, unix_s FROM ledger"


def clocks(stored: str) -> str:
    """Makes the draft a job with clocks, and gives it these."""
    text = job_file("draft", goal=1, more='[mode]\nkind = "ssp"\nconcurrency = 2\nslack = 1\n').replace("'", "''")
    return job("draft", f"job_file = '{text}', protocol = '{stored}'".replace("{", "{{").replace("}", "}}"))


def exchange(stored: str) -> str:
    """Makes the draft a decentralised job, whose exchange has this state."""
    more = '[mode]\nkind = "gossip"\n[updates]\nweighting = "uniform"\n'
    selection = {"goal": 3, "over_selection": 1.3, "min_fraction": 0.6}
    text = write_job("draft", selection=selection, more=more).replace("'", "''")
    return job("draft", f"job_file = '{text}', protocol = '{stored}'".replace("{", "{{").replace("}", "}}"))


BREAKAGES: Mapping[str, tuple[Callable[..., object], str]] = {
    "merged in an abandoned attempt": (
        attempts.merged_once,
        assignment("done", 2, 1, "true", "state = 'MERGED', reason = NULL"),
    ),
    "merged and not counted": (attempts.merged_once, version(1, "num_updates = 1")),
    "counted and not merged": (
        attempts.merged_once,
        assignment("done", 1, 1, "state = 'MERGED'", "state = 'DROPPED', reason = 'ATTEMPT_ABANDONED'"),
    ),
    "a version is missing": (
        jobs.versions_are_dense,
        "DELETE FROM model_versions WHERE job_id = '{done}' AND version = 1",
    ),
    "the first version is missing": (
        jobs.versions_are_dense,
        "DELETE FROM model_versions WHERE job_id = '{done}' AND version = 0",
    ),
    "a version without a committed attempt": (
        jobs.versions_have_one_attempt,
        attempt("done", 1, 1, "phase = 'ABANDONED'"),
    ),
    "a version of another attempt": (jobs.versions_have_one_attempt, version(2, "attempt = 1")),
    "a version of an evaluation": (jobs.versions_have_one_attempt, attempt("done", 1, 1, "kind = 'EVALUATE'")),
    "a committed attempt without a version": (
        jobs.versions_have_one_attempt,
        new_attempt(3, 1, "TRAIN", "COMMITTED", 2),
    ),
    "another base version": (jobs.versions_have_one_attempt, attempt("done", 2, 2, "base_version = 0")),
    "a release that is not charged": (
        checks.releases_are_charged,
        "DELETE FROM ledger WHERE job_id = '{private}'",
    ),
    "a charge for what is no release": (checks.releases_are_charged, new_charge("done", 1)),
    "a charge for another round": (checks.releases_are_charged, "UPDATE ledger SET round = 7"),
    "a charge for less noise": (
        checks.releases_are_charged,
        "UPDATE ledger SET mechanism = replace(mechanism, '4.0', '9.0')",
    ),
    "more charges than were planned": (checks.releases_are_within_the_plan, new_charge("private", 0)),
    "a private job that was never settled": (jobs.job_file_is_readable, job("private", "privacy = NULL")),
    "a warm start of a job without": (
        jobs.warm_starts_come_first,
        new_attempt(0, 1, "WARM_START", "COMMITTED", 0),
    ),
    "a warm start after round 1": (jobs.warm_starts_come_first, attempt("done", 2, 2, "kind = 'WARM_START'")),
    "a version of no round": (jobs.warm_starts_come_first, version(1, "round = 0")),
    "a momentum that is gone": (jobs.optimizer_state_is_kept, version(2, "state_digest = ''")),
    "a momentum of the initial model": (jobs.optimizer_state_is_kept, version(0, "state_digest = digest")),
    "a delta that is gone": (jobs.deltas_are_kept, version(2, "delta_digest = ''")),
    "a delta to the initial model": (jobs.deltas_are_kept, version(0, "delta_digest = digest")),
    "a delta from another model": (jobs.deltas_are_kept, version(2, "delta_base = digest")),
    "a delta of another size": (files.blobs, version(2, "delta_size_bytes = 1")),
    "a wrong latest version": (jobs.counters_agree, job("done", "latest_version = 1")),
    "a wrong round": (jobs.counters_agree, job("done", "round = 1")),
    "a rollback to a later version": (jobs.rollbacks_repeat_a_version, version(1, "restored_from = 2")),
    "a rollback with other bytes": (
        jobs.rollbacks_repeat_a_version,
        version(2, "restored_from = 1, round = 0, attempt = 0"),
    ),
    "the latest model is given up": (jobs.what_is_needed_is_kept, version(2, "model_removed_unix_s = 1.0")),
    "the first model is given up": (jobs.what_is_needed_is_kept, version(0, "model_removed_unix_s = 1.0")),
    "a gap between attempts": (jobs.attempts_are_numbered, attempt("done", 2, 2, "number = 3")),
    "a gap between rounds": (jobs.attempts_are_numbered, new_attempt(4, 1, "TRAIN", "ABANDONED", 2)),
    "another size": (files.blobs, version(1, "size_bytes = size_bytes + 1")),
    "no digest": (files.blobs, version(1, "digest = '../../etc/passwd'")),
    "a report without an end": (
        attempts.acknowledged_has_an_end,
        assignment("done", 2, 2, "state = 'MERGED'", "state = 'REPORTED'"),
    ),
    "an end without a reason": (
        attempts.ended_for_a_reason,
        assignment("done", 1, 1, "state = 'FAILED'", "reason = NULL"),
    ),
    "a merged one with a reason": (
        attempts.ended_for_a_reason,
        assignment("done", 1, 1, "state = 'MERGED'", "reason = 'STALE'"),
    ),
    "a report without its moment": (
        attempts.reports_are_complete,
        assignment("done", 1, 1, "state = 'MERGED'", "reported_revision = NULL"),
    ),
    "a report of the future": (
        attempts.reports_are_complete,
        assignment("done", 1, 1, "state = 'MERGED'", "reported_revision = 1000"),
    ),
    "a report without a digest": (
        attempts.reports_are_complete,
        assignment("open", 1, 1, "state = 'REPORTED'", "digest = ''"),
    ),
    "below the minimum": (attempts.above_the_minimum, attempt("done", 1, 1, "minimum = 3")),
    "a weight that was changed": (
        attempts.weights_add_up,
        assignment("done", 1, 1, "state = 'MERGED'", "weight = weight * 1.0000001"),
    ),
    "a total weight that was changed": (
        attempts.weights_add_up,
        version(1, "total_weight = total_weight * 1.0000001"),
    ),
    "a weight that is not that of its examples": (
        attempts.weights_are_right,
        assignment("open", 1, 1, "state = 'REPORTED'", "weight = weight * 1.0000001"),
    ),
    "a staleness that is not that of its base version": (
        attempts.weights_are_right,
        assignment("done", 1, 1, "state = 'MERGED'", "staleness = 1"),
    ),
    "training in an ended attempt": (
        attempts.nothing_open_in_the_ended,
        assignment("done", 1, 1, "true", "state = 'TRAINING', reason = NULL"),
    ),
    "uploading while the attempt commits": (
        attempts.nothing_open_in_the_ended,
        attempt("open", 1, 1, "phase = 'COMMITTING'"),
    ),
    "two open attempts": (jobs.one_open_attempt, attempt("done", 2, 1, "phase = 'COLLECTING'")),
    "an open attempt of a job that has ended": (
        jobs.open_attempts_belong_to_jobs_at_work,
        job("open", "status = 'CANCELLED'"),
    ),
    "an open attempt of a paused job": (
        jobs.open_attempts_belong_to_jobs_at_work,
        job("open", "status = 'PAUSED'"),
    ),
    "an ended attempt without an end": (attempts.end_is_noted, attempt("done", 1, 1, "ended_unix_s = NULL")),
    "an open attempt with an end": (attempts.end_is_noted, attempt("open", 1, 1, "ended_unix_s = 1.0")),
    "open after its deadline": (
        attempts.overdue,
        assignment("open", 1, 1, "state = 'TRAINING'", "deadline_unix_s = 1.0"),
    ),
    "an audit row that was changed": (
        checks.audit_chain,
        "UPDATE audit_log SET actor = 'nobody' WHERE sequence = 2",
    ),
    "an audit row that is gone": (checks.audit_chain, "DELETE FROM audit_log WHERE sequence = 2"),
    "the first audit row is gone": (checks.audit_chain, "DELETE FROM audit_log WHERE sequence = 1"),
    "the last audit row is gone": (
        checks.audit_end,
        "DELETE FROM audit_log WHERE sequence = (SELECT num_rows FROM audit_head)",
    ),
    "all of the audit log is gone": (checks.audit_end, "DELETE FROM audit_log"),
    "an audit log that was cut short, and its head, too": (
        checks.audit_end,
        "UPDATE audit_head SET num_rows = num_rows - 1",
    ),
    "the audit log's head is gone": (checks.audit_end, "DELETE FROM audit_head"),
    "clients that did not rest": (
        jobs.takes_part_seldom_enough,
        job("done", "job_file = replace(job_file, 'min_fraction', 'min_separation = 1\nmin_fraction')"),
    ),
    "a clock too far ahead": (
        jobs.clocks_are_close,
        clocks('{"clocks": {"a": 4, "b": 1}, "ahead": {}, "minimum": 1}'),
    ),
    "a clock below the minimum": (
        jobs.clocks_are_close,
        clocks('{"clocks": {"a": 1}, "ahead": {"b": 0}, "minimum": 1}'),
    ),
    "more clocks than may be": (
        jobs.clocks_are_close,
        clocks('{"clocks": {"a": 1, "b": 1, "c": 1}, "ahead": {}, "minimum": 1}'),
    ),
    "clocks that are none": (jobs.state_is_of_its_kind, clocks('{"clocks": 3}')),
    "a state of another kind": (jobs.state_is_of_its_kind, job("done", "protocol = '{{}}'")),
    "an exchange of no shape": (jobs.state_is_of_its_kind, exchange("3")),
    "an exchange in another round": (jobs.gossip_agrees, exchange('{"round": 7}')),
    "a mean without a version": (
        jobs.gossip_agrees,
        exchange('{"round": 1, "outcome": {"status": "COMPLETED", "digest": "abc"}}'),
    ),
    "a job file of another world": (jobs.job_file_is_readable, job("draft", "job_file = 'name = 3'")),
    "a state that no row of the history has": (jobs.job_history, job("draft", "status = 'RUNNING'")),
    "a state that nobody knows": (
        jobs.assignment_histories,
        assignment("done", 1, 1, "true", "state = 'NONSENSE', reason = 'STALE'"),
    ),
    "a phase that no row of the history has": (
        jobs.attempt_history,
        attempt("done", 2, 1, "phase = 'COMMITTED', kind = 'EVALUATE'"),
    ),
    "a step of a job that is not allowed": (
        jobs.job_history,
        history("to_state = 'RUNNING'", "to_state = 'COMPLETED'"),
    ),
    "a step of an attempt that is gone": (jobs.attempt_history, history("to_state = 'COLLECTING'")),
    "a step of an assignment that is gone": (
        jobs.assignment_histories,
        history("entity = 'assignment' AND to_state = 'TRAINING'"),
    ),
    "an assignment that is gone": (
        jobs.assignment_histories,
        "DELETE FROM assignments WHERE job_id = '{done}' AND round = 1",
    ),
    "an attempt that is gone": (
        jobs.stray_histories,
        "DELETE FROM attempts WHERE job_id = '{done}' AND number = 1 AND phase = 'ABANDONED'",
    ),
    "a version that no row of the history has": (jobs.version_histories, history("entity = 'version'")),
    "a version noted out of order": (jobs.version_histories, history("entity = 'version'", "from_state = '5'")),
    "an entity that nobody knows": (
        jobs.stray_histories,
        history("entity = 'attempt'", "entity = 'ghost', attempt = 9"),
    ),
    "two clients in one place": (
        attempts.positions_are_unique,
        "UPDATE assignments SET secure_group = 0, secure_position = 0 WHERE job_id = '{done}'",
    ),
    "survivors without masks": (attempts.unmasked_above_the_minimum, attempt("done", 1, 1, "num_survivors = 1")),
    "messages of an attempt that has ended": (
        attempts.messages_are_removed,
        "INSERT INTO secure_messages SELECT job_id, round, number, client_id, 'keys', token_hash "
        "FROM assignments WHERE job_id = '{done}'",
    ),
}
