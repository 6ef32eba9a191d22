"""`fedplat conformance`: run a client, in whatever language, through the cases of the protocol."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Literal

import msgspec
import typer

from fedplat.cli import options, session
from fedplat.cli.output import Output
from fedplat.command_line.with_typer import read_duration
from fedplat.errors import MissingExtraError
from fedplat.extras import install_command


def conformance(  # noqa: PLR0913 - a command's parameters are its options
    context: typer.Context,
    client: Annotated[
        str,
        typer.Option(
            metavar="COMMAND",
            help="Command that runs the client until it is stopped. It gets the variables FEDPLAT_TICKET, "
            "FEDPLAT_CLIENT_DATA_DIR and FEDPLAT_TRANSPORT, and has a trainer and, if it can, an evaluator of the name "
            "conformance, as docs/protocol.md describes them.",
        ),
    ],
    only: Annotated[list[str] | None, typer.Option(metavar="CASE", help="Case to run; repeatable.")] = None,
    known: Annotated[
        list[str] | None,
        typer.Option(metavar="CASE", help="Case that is known to fail, which is no failure then; repeatable."),
    ] = None,
    transport: Annotated[
        Literal["http", "grpc"],
        typer.Option(help="Transport of the calls; the client finds it in FEDPLAT_TRANSPORT, too."),
    ] = "http",
    case_time_s: Annotated[
        float,
        typer.Option("--case-time", metavar="DURATION", parser=read_duration, help="Longest time of a case, from 1s."),
    ] = 60.0,
    as_json: options.JsonOption = False,
) -> None:
    """Run a client, in any language, through the cases of the protocol.

    A scripted server on this machine plays them over HTTP/1.1 or gRPC. Prints a line for each case. The exit status is
    1 if a case fails, or if one that is known to fail passes.
    """
    if case_time_s < 1.0:
        raise typer.BadParameter(f"--case-time {case_time_s:g}s: expected at least 1s")
    with session.reporting(context, as_json) as output:
        try:
            from fedplat.testing.wire import run
        except ModuleNotFoundError as exc:
            if exc.name is None or exc.name.partition(".")[0] != "cryptography":
                raise
            raise MissingExtraError(
                f"conformance needs the package cryptography; install it with: {install_command('privacy')}"
            ) from exc
        try:
            run.find_cases([*(only or ()), *(known or ())])
            results: list[run.CaseResult] = []
            for result in run.run(client, only or (), case_time_s, transport):
                results.append(result)
                if not output.as_json:
                    _print(output, result, is_known=result.name in (known or ()))
        except ValueError as exc:
            output.error(str(exc))
            raise typer.Exit(session.WRONG_USAGE) from exc
        counts = Counter(each.outcome for each in results)
        wrong = [each.name for each in results if (each.outcome == "failed") != (each.name in (known or ()))]
        wrong = [name for name in wrong if name not in {each.name for each in results if each.outcome == "skipped"}]
        if output.as_json:
            output.json({**counts, "wrong": wrong, "cases": [msgspec.to_builtins(each) for each in results]})
        else:
            output.line(", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items())))
        if wrong:
            raise typer.Exit(session.FAILED)


def _print(output: Output, result: object, *, is_known: bool) -> None:
    from fedplat.testing.wire.run import CaseResult

    assert isinstance(result, CaseResult)
    words = {"passed": "PASS", "failed": "FAIL", "skipped": "SKIP"}
    known = " (known)" if is_known and result.outcome == "failed" else ""
    reason = f": {result.reason}" if result.reason else ""
    output.line(f"{words[result.outcome]} {result.name}{known}{reason}")
    for line in result.log.splitlines()[-10:]:
        output.line(f"     | {line}")
