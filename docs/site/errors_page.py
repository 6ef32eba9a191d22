"""Write docs/errors.md: every code of the server, every reason of an assignment, and what to do about each.

    python docs/site/errors_page.py

What was wrong, the gRPC status and the time of the next try are those of `fedplat_server.errors.Code` and
`fedplat.rounds.states.Reason`. What is expected, and what to do, is in the tables below, which name all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from fedplat.rounds.states import DECLINES, FAILURES, REASON_TEXTS, Reason
from fedplat_server.errors import Code

PAGE = Path(__file__).resolve().parents[1] / "errors.md"

HEAD = """\
# Errors by code

This page is generated from the codes and reasons of the source (`python docs/site/errors_page.py`). A refused call
has a *code*. The message of a command ends with it, such as `(docs: E-REVOKED)`; programs find it without `E-` as
`ServerRefusedError.code`, as the trailing metadata `fedplat-code`, and in the log of the server. An assignment that
did not contribute has a *reason*, which `fedplat job assignments JOB` and `fedplat job describe JOB` show. What the
commands end with are the [exit statuses](operations.md#exit-statuses-of-fedplat).

The message that you have seen may end with a detail, such as the name or the limit that it is about.
"""

_RETRIES = "nothing: clients and commands try again by themselves"

CODES: Mapping[Code, tuple[str, str]] = {
    Code.UNAUTHENTICATED: (
        "a call of a client is signed in an open session, or has a certificate of the server's authority",
        "of `fedplat-client`: update it; of another program: open a session before the call",
    ),
    Code.NO_OPERATOR: (
        "the profile of an operator that this server knows",
        "`fedplat --profile FILE status` with the right profile; if it is lost, an admin creates another one",
    ),
    Code.ROLE_TOO_LOW: (
        "the role that the message names: viewer reads, operator runs jobs, admin manages operators",
        "ask an admin, or use the profile of an operator with that role; `fedplat operator list` has the roles",
    ),
    Code.TOO_MANY_LOGINS: (
        "few refused calls from one address",
        "find the program that calls with a wrong token or signature, which the server's log names by its address",
    ),
    Code.NAME_TAKEN: ("a name that no operator has", "choose another name, or remove the operator first"),
    Code.NO_SUCH_OPERATOR: ("the name of an operator", "`fedplat operator list`"),
    Code.LAST_ADMIN: ("one admin at least", "`fedplat operator add NAME --role admin`, then remove this one"),
    Code.NO_SUCH_WEBHOOK: ("the id of a webhook, such as w-0123456789ab", "`fedplat webhook list`"),
    Code.TOO_MANY_WEBHOOKS: ("at most 20 webhooks", "`fedplat webhook remove ID`"),
    Code.BAD_SIGNATURE: (
        "the signature of the client's key over exactly this call",
        "look for a proxy that changes requests, or a copied data folder; of your own client: compare what it signs",
    ),
    Code.REPLAYED: (
        "each call of a session has a number of its own",
        "nothing: the client signs the call again. If it persists, two processes use one session",
    ),
    Code.SESSION_UNKNOWN: (
        "a session that this server has opened; it forgets all of them when it restarts",
        "nothing: the client opens another one",
    ),
    Code.CHALLENGE_EXPIRED: (
        "a nonce that is used once, soon after the server has made it",
        "nothing: the client requests another one",
    ),
    Code.CLIENT_UNKNOWN: (
        "a client that enrolled with the database of this server",
        "was a backup restored, or the client pruned? Enroll it again, with a new ticket and an empty data folder",
    ),
    Code.FENCED: (
        "one process for each data folder of a client",
        "stop the other process: a copy of the folder on another machine, or a second service",
    ),
    Code.REVOKED: (
        "a client that was not revoked",
        "revoked by mistake? Enroll the device as another client, with a new ticket and another data folder",
    ),
    Code.CERTIFICATE_UNKNOWN: (
        "a certificate that this server has issued to an enrolled client",
        "the port of `--mtls-listen` is for clients with `--mtls` only; operators use `--listen`",
    ),
    Code.CERTIFICATE_EXPIRED: (
        "a certificate that is valid now",
        "nothing: the client renews it. If it persists, check the clocks of both machines",
    ),
    Code.NO_CERTIFICATES: (
        "a server with the authority in `DATA_DIR/pki`, and `--mtls-listen`",
        "start the client without `--mtls` and `--peer-listen`, or the server with `--mtls-listen HOST:PORT`",
    ),
    Code.TOKEN_UNKNOWN: (
        "a ticket of this server",
        "`fedplat enrollment create --population NAME`; tickets of another server or a lost database are useless",
    ),
    Code.TOKEN_REFUSED: (
        "a ticket that is not used up, expired or revoked, and of this population",
        "`fedplat enrollment list` has the cause; create another ticket",
    ),
    Code.UNSUPPORTED_VERSION: (
        "one of the versions of the protocol that the message lists",
        "update the older side; servers are [updated first](upgrading.md)",
    ),
    Code.INVALID_REQUEST: (
        "what the detail says",
        "correct the argument; if the command line was accepted, update the command `fedplat` to the server's version",
    ),
    Code.INVALID_JOB_FILE: (
        "a job file in which every key is known and fits to the others",
        "`fedplat job check FILE` lists all mistakes; see the [reference](job-reference.md)",
    ),
    Code.INVALID_MODEL: (
        "a safetensors file with the tensors that the job expects, without NaN",
        "export the model again; `model.initial` needs one of the same architecture",
    ),
    Code.NO_SUCH_CLIENT: ("the id of an enrolled client", "`fedplat client list`"),
    Code.NO_SUCH_ENROLLMENT: ("the id of a ticket, such as e-0123456789ab", "`fedplat enrollment list`"),
    Code.NO_SUCH_JOB: ("the id or the name of a job", "`fedplat job list`"),
    Code.AMBIGUOUS_JOB: ("a name that one job has", "use the id from `fedplat job list --search NAME`"),
    Code.NO_SUCH_ROUND: ("a round that has begun", "`fedplat job rounds JOB --all`"),
    Code.NO_SUCH_VERSION: ("a committed version", "`fedplat model list JOB`"),
    Code.VERSION_REMOVED: (
        "a version whose file is kept",
        "choose another one from `fedplat model list JOB`, or a backup; `[retention]` sets what is kept",
    ),
    Code.HELD_BY_CLIENTS: ("a job whose model is on the server", "copy the file from the data folder of a client"),
    Code.NO_SUCH_MODEL: (
        "the model of an assignment of this client",
        "nothing if its round has just ended; otherwise run `fedplat-server verify`",
    ),
    Code.NO_SUCH_EVALUATOR: (
        "a name that `fedplat-server run --evaluator NAME=REF` has",
        "add the evaluator to all daemons, or correct the job file",
    ),
    Code.NO_SUCH_TRAINER: (
        "a name that `fedplat-server run --trainer NAME=REF` has",
        "add the trainer to all daemons, or correct `[warm_start]` or `[server_step]`",
    ),
    Code.ILLEGAL_ACTION: (
        "a status that allows the command: only a paused job resumes, and none that has ended changes",
        "`fedplat job describe JOB`",
    ),
    Code.OVER_BUDGET: (
        "a job whose whole privacy loss fits into what its population has left",
        "`fedplat privacy show`; fewer rounds or more noise, or a larger budget, which is a decision about people",
    ),
    Code.STALE_ASSIGNMENT: (
        "an assignment that is open",
        "nothing: the client asks for another one. If it is frequent, raise `deadlines`",
    ),
    Code.WRONG_OFFSET: ("the offset at which the server stopped", "nothing: the client asks for it and continues"),
    Code.TOO_LARGE: (
        "at most as many bytes as the message names",
        "a smaller model, labels or text; the limits are in [security](security.md#limits-of-a-caller)",
    ),
    Code.UPLOAD_INCOMPLETE: ("all bytes before the report", _RETRIES),
    Code.NOT_SENT_YET: ("the neighbour's model, which is on its way", _RETRIES),
    Code.TOO_SLOW: (
        "progress of the transfer",
        "nothing: it continues where it stopped. Look for a slow or lossy [line](operations.md#slow-lines)",
    ),
    Code.TOO_MANY_CALLS: ("few open calls of one caller", "fewer processes with one identity"),
    Code.TOO_MANY_STREAMS: ("few transfers of one client at a time", _RETRIES),
    Code.TOO_MANY_REQUESTS: (
        "fewer requests than the [limits](security.md#limits-of-a-caller) of a caller",
        "many clients behind one address that ends TLS? Name the proxy with `--trusted-proxy CIDR`",
    ),
    Code.TOO_MANY_BYTES: (
        "the bytes of one update, with repetitions",
        "look at the client's line or program: it sent the same update again and again",
    ),
    Code.TOO_MANY_UPLOADS: (
        "memory for one more update",
        "nothing: clients wait. If it is frequent, raise `fedplat-server run --upload-memory-mib`",
    ),
    Code.DRAINING: ("a server that is not stopping", _RETRIES),
    Code.NO_LEADER: (
        "a daemon that leads the jobs",
        "wait 10 s; then look at the logs of the daemons and of PostgreSQL, which the leader needs",
    ),
    Code.STORE_UNAVAILABLE: (
        "an answer of the database and of the object store",
        "start PostgreSQL or the store, or mend the network; rounds continue by themselves",
    ),
    Code.STORAGE_FULL: (
        "room on the disk of the data folder or the database",
        "`fedplat-server prune --dry-run` lists what can go; rounds continue when there is room",
    ),
    Code.INTERNAL: (
        "a call without a fault of the server",
        "search the server's log for the number in the message, and report the lines around it",
    ),
}
"""What each code expects, and what to do."""

REASONS: Mapping[Reason, tuple[str, str]] = {
    Reason.NO_WORK: ("a running job of the client's population", "`fedplat job list`; submit or resume a job"),
    Reason.NOT_SELECTED: ("nothing", "nothing: the client waits for the next round"),
    Reason.NOT_ELIGIBLE: (
        "a client that has the labels, trainer and codec of a running job",
        "`fedplat client describe CLIENT` names what is missing for each job",
    ),
    Reason.DRAINING: ("a server that is not stopping", "nothing: clients come back"),
    Reason.OVERLOADED: ("room for one more waiting client", "another daemon, or fewer clients"),
    Reason.LIMIT_REACHED: (
        "fewer participations than `privacy.max_participations`",
        "nothing: the guarantee depends on it. More clients, or a new job with another plan",
    ),
    Reason.TRAIN_TIMEOUT: (
        "training within `deadlines.training_s`",
        "raise it or let it adapt (`deadlines.adaptive`), train less (`config`), or choose clients (`selection.where`)",
    ),
    Reason.UPLOAD_TIMEOUT: (
        "the upload within `deadlines.upload_s`",
        "raise it, or make updates smaller with `[compression]`",
    ),
    Reason.STEP_TIMEOUT: (
        "each message of secure aggregation in time",
        "look for clients with slow lines; survivors go on",
    ),
    Reason.SURPLUS: ("nothing", "nothing; with less waste if `selection.over_selection` is smaller"),
    Reason.ATTEMPT_ABANDONED: (
        "enough reports at the deadline",
        "`fedplat job describe JOB` has the cause; the round is tried again",
    ),
    Reason.JOB_PAUSED: ("a running job", "`fedplat job resume JOB` when its cause is mended"),
    Reason.JOB_CANCELLED: ("a running job", "nothing"),
    Reason.STALE: ("the token of an open assignment", "nothing: the round ended, or the server gave it to another try"),
    Reason.TOO_STALE: ("an update that is not older than `max_staleness`", "raise it, or give slow clients less work"),
    Reason.TRAINER_ERROR: (
        "a trainer that returns a result",
        "the text has the exception, the client's log the traceback. Mend the trainer, then `fedplat job resume JOB`",
    ),
    Reason.UNKNOWN_TRAINER: (
        "`fedplat-client run --trainer NAME=...` with the job's trainer",
        "start the client with it; `fedplat client list -o wide` shows what each has",
    ),
    Reason.CLIENT_STOPPED: ("a client that stays until its report", "nothing: others are drawn"),
    Reason.TRANSFER_FAILED: (
        "the whole model, with its digest",
        "the text has the cause: a full disk of the client, a line, a limit",
    ),
    Reason.UNKNOWN_CODEC: ("a client with the codec of `[compression]`", "update the client, or choose another codec"),
    Reason.PRIVACY_LIMIT: (
        "a job that costs at most what the owner of the data allows",
        "more noise or fewer rounds, or ask the owner",
    ),
    Reason.UNSAFE_AGGREGATION: (
        "secure aggregation or an exchange that the client's owner allows",
        "compare the job with the client's options `--require-...`, `--min-...`, `--exchange-models`",
    ),
    Reason.KEYS_LOST: ("a client that lives through the attempt", "nothing: the next attempt has new keys"),
    Reason.NOT_APPROVED: (
        "a job that the client's owner has approved, and exactly what its file says",
        "ask the owner; the text has what differs: [approving jobs](approval.md)",
    ),
    Reason.UNREACHABLE: ("a heartbeat each `deadlines.heartbeat_s`", "look at the client's machine and line"),
    Reason.REVOKED: ("a client that was not revoked", "`fedplat audit` has who revoked it"),
    Reason.REJECTED_SCHEMA: (
        "the tensors of the base version, with their types and shapes",
        "return what `task.parameters` has; the text names the first difference",
    ),
    Reason.REJECTED_NONFINITE: (
        "finite numbers",
        "the training diverged: a smaller learning rate, clipped gradients, or scaled inputs at that client",
    ),
    Reason.REJECTED_WEIGHT: (
        "a number of examples from 1e-6 to 1e15",
        "correct `num_examples` of the trainer's result",
    ),
    Reason.REJECTED_DIGEST: (
        "the bytes that the report names",
        "look at the disk and memory of the client; the round continues",
    ),
    Reason.REJECTED_CONFLICT: (
        "one content for each assignment",
        "two processes with one identity, or a trainer that changes a result after it returned it",
    ),
    Reason.REJECTED_METRICS: (
        "few finite numbers, and those that the job's rule needs",
        "leave out a metric that was not measured; the text names it",
    ),
    Reason.REJECTED_NORM: (
        "a norm of at most `updates.max_norm`",
        "a smaller learning rate, or a higher limit, if such updates are right",
    ),
    Reason.REJECTED_OUTLIER: (
        "a norm that is near those of the others",
        "look at the data of that client; `updates.outlier_factor` sets what is far",
    ),
    Reason.REJECTED_MESSAGE: (
        "a valid message of secure aggregation",
        "update the client; if it is new, its machine may be faulty",
    ),
}
"""What each reason expects, and what to do."""


def render() -> str:
    """Return the page in Markdown."""
    codes = "\n".join(_code(code) for code in Code)
    reasons = "\n".join(_reason(reason) for reason in Reason)
    return f"{HEAD}\n## Codes of refused calls\n\n{codes}\n## Reasons of assignments\n\n{reasons}"


def _code(code: Code) -> str:
    status = f"gRPC status {code.status}"
    if code.retry is not None:
        status += f"; the next try may be after {code.retry.min_s:g} to {code.retry.max_s:g} s"
    return _entry(f"E-{code.name}", code.message, status, CODES[code])


def _reason(reason: Reason) -> str:
    who = "Stated by the server"
    if reason in FAILURES:
        who = "Stated by the client, which is not asked again" if reason in DECLINES else "Stated by the client"
    return _entry(reason.value, REASON_TEXTS[reason], who, REASONS[reason])


def _entry(name: str, wrong: str, kind: str, advice: tuple[str, str]) -> str:
    return "".join(_lines(name, wrong, kind, *advice))


def _lines(name: str, wrong: str, kind: str, expected: str, action: str) -> Iterator[str]:
    yield f"### `{name}`\n\n"
    yield f"*{kind}*\n\n"
    yield f"- **Wrong**: {wrong}.\n"
    yield f"- **Expected**: {expected}.\n"
    yield f"- **Do**: {action}.\n"


if __name__ == "__main__":
    PAGE.write_text(render(), "utf-8")
