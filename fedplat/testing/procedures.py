"""The checks of procedures, over the tables of a few sites."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping

import msgspec
from msgspec import Struct

from fedplat.model import Parameters
from fedplat.procedures import ExactSum, Finished, Procedure, SiteTable, Step
from fedplat.procedures.contract import METHODS
from fedplat.procedures.runs import MAX_STEPS, AskedStep, ask, open_table
from fedplat.tables.files import Frame
from fedplat.testing.errors import ConformanceError, run_checks, wrap_errors


@dataclasses.dataclass(frozen=True)
class ProcedureUnderTest:
    """A procedure, the tables of the sites, and all steps that it takes with them."""

    procedure: Procedure
    tables: Mapping[str, SiteTable]
    asked: tuple[AskedStep, ...]


def check_procedure(
    procedure: Procedure, frames: Mapping[str, Frame | SiteTable], *, max_steps: int = MAX_STEPS
) -> None:
    """Check a procedure with the table of each site. Raises `ConformanceError` for the first check that fails."""
    missing = [name for name in METHODS if not callable(getattr(procedure, name, None))]
    if missing:
        raise ConformanceError("interface", f"there is no {missing[0]}(); a procedure has {', '.join(METHODS)}")
    if not (isinstance(procedure, Struct) and procedure.__struct_config__.frozen):
        name = type(procedure).__name__
        raise ConformanceError(
            "interface", f"{name} is not a frozen record; expected class {name}(msgspec.Struct, frozen=True)"
        )
    with wrap_errors("steps"):
        tables = {name: open_table(frame) for name, frame in frames.items()}
        asked = tuple(ask(procedure, tables, max_steps))
    run_checks(CHECKS, ProcedureUnderTest(procedure, tables, asked))


def check_a_site_knows_the_step_from_the_message_alone(tested: ProcedureUnderTest) -> Iterator[str]:
    """Require the same replies to the bytes of a message, which are all that a site gets: nothing else is shared."""
    for number, asked in enumerate(tested.asked, 1):
        message = Parameters.from_bytes(asked.step.message.to_bytes())
        if not message:
            yield f"the message of step {number} has no tensors; expected at least one"
        schema = tested.procedure.schema(message)
        if schema != asked.totals.schema:
            yield f"schema() of step {number} differs when it is asked again; expected one for each message"
        total = ExactSum(schema)
        for name in reversed(list(tested.tables)):
            reply = schema.encode(tested.procedure.answer(message, tested.tables[name]))
            if schema.encode(tested.procedure.answer(message, tested.tables[name])).tobytes() != reply.tobytes():
                yield f"answer() in step {number} differs when it is asked again: a repeated step would reveal more"
            total.add(reply)
        if total.totals.integers.tobytes() != asked.totals.integers.tobytes():
            yield f"the replies to step {number} depend on calls before; expected no memory but Step.state"


def check_all_memory_is_in_the_state(tested: ProcedureUnderTest) -> Iterator[str]:
    """Require the same outcome of each step again: a restarted server continues from the stored state."""
    if _encode(tested.procedure.begin()) != _encode(tested.asked[0].step):
        yield "begin() returns another step when it is called again; expected the same bytes"
    for number, asked in enumerate(tested.asked, 1):
        again = tested.procedure.advance(bytes(asked.step.state), asked.totals)
        if _encode(again) != _encode(asked.outcome):
            yield f"advance() of step {number} returns something else when it is called again; expected the same bytes"


def check_the_result_is_plain_json(tested: ProcedureUnderTest) -> Iterator[str]:
    """Require a result that JSON has: NaN and infinite numbers would silently become null."""
    outcome = tested.asked[-1].outcome
    assert isinstance(outcome, Finished)
    if not outcome.result:
        yield "the result is empty; expected at least one key"
    if msgspec.json.decode(msgspec.json.encode(outcome.result)) != outcome.result:
        yield "the result changes when it is written as JSON; expected finite numbers, texts, lists and dictionaries"


def check_everything_that_leaves_is_disclosed(tested: ProcedureUnderTest) -> Iterator[str]:
    """Require a disclosure for each tensor of the replies, as large, as wide and as often as in any step."""
    disclosed = {each.name: each for each in tested.procedure.disclosures()}
    times = Counter[str]()
    for asked in tested.asked:
        for tensor in asked.totals.schema.tensors:
            name = tensor.name
            times[name] += 1
            if name not in disclosed:
                yield f"disclosures() has no {name!r}, which sites send; expected all tensors of schema()"
                continue
            promised = disclosed[name]
            for what, found, stated in (
                ("numbers", tensor.count, promised.count),
                ("as their bound", tensor.bound, promised.bound),
                ("times", times[name], promised.times),
            ):
                if found > stated:
                    yield f"sites send {name!r} with {found:g} {what}, and disclosures() states {stated:g} at most"
            if 2.0**tensor.exponent < promised.step:
                yield f"sites send {name!r} in steps of 2^{tensor.exponent}, and disclosures() states {promised.step:g}"


CHECKS = (
    check_a_site_knows_the_step_from_the_message_alone,
    check_all_memory_is_in_the_state,
    check_the_result_is_plain_json,
    check_everything_that_leaves_is_disclosed,
)


def _encode(outcome: Step | Finished) -> tuple[bytes, ...]:
    if isinstance(outcome, Step):
        return b"step", outcome.message.to_bytes(), outcome.state
    return b"finished", msgspec.json.encode(outcome.result), msgspec.json.encode(outcome.files)
