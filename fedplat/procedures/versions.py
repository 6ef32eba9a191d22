"""A procedure as the versions of a job's model: messages, and at the end the result.

Version k is the message of step k + 1, and the state of the step is stored beside it. The last version is the result.
So what a server stores, restores and sends for a model it does for a procedure, too, without knowing about it.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import msgspec
import numpy as np

from fedplat import texts
from fedplat.config import toml
from fedplat.config.decoding import prepare_type
from fedplat.errors import ProcedureError
from fedplat.model import Parameters
from fedplat.procedures.contract import Finished, Procedure, Step
from fedplat.procedures.runs import ProcedureResult
from fedplat.procedures.sums import ReplyTotals

RESULT = "result.json"
"""The tensor of a result with its JSON, which no message has."""
_FILES = "files/"
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}")


class ProcedureVersion(NamedTuple):
    """A version of a job with a procedure: a message with the state of its step, or the result at the end."""

    model: Parameters
    state: bytes = b""
    is_result: bool = False


class _Summary(msgspec.Struct, frozen=True):
    sites: int
    steps: int
    result: dict[str, Any]


def encode_options(procedure: Procedure) -> bytes:
    """Return the table `[procedure]` of a job file as an assignment has it, in JSON."""
    return msgspec.json.encode(toml.to_table(procedure))  # pyright: ignore[reportArgumentType] - it is a record


def describe_task(options: bytes, version: int) -> dict[str, str | int]:
    """Return what all sites of a step have in common besides its message: the options as `encode_options` has them.

    Under masks it is part of the setup that the sites sign (`digest_task`). With other options for the others, such as
    a condition that no row meets, the sum would be the reply of one site.
    """
    return {"procedure": options.decode(errors="replace"), "version": version}


def begin(procedure: Procedure) -> ProcedureVersion:
    """Return version 0: the first question. Raises `ProcedureError` for a message that no job can have."""
    return _of_step(procedure.begin())


def advance(procedure: Procedure, version: int, state: bytes, totals: ReplyTotals) -> ProcedureVersion:
    """Return the version after a number of steps; `totals` are the sums of the replies to the last message.

    Raises `ProcedureError` for a message or a result that no job can have, and what the procedure raises.
    """
    outcome = procedure.advance(state, totals)
    if isinstance(outcome, Step):
        return _of_step(outcome)
    return ProcedureVersion(write_result(totals.num_sites, version, outcome), is_result=True)


def _of_step(step: Step) -> ProcedureVersion:
    if not step.message or RESULT in step.message:
        found = "no tensor" if not step.message else f"a tensor {texts.quote(RESULT)}"
        raise ProcedureError(f"the message of a step has {found}; expected at least one, and none of that name")
    return ProcedureVersion(step.message, step.state)


def write_result(num_sites: int, num_steps: int, finished: Finished) -> Parameters:
    """Return the last version: the bytes of the result as JSON, and of each file. Raises `ProcedureError`."""
    if odd := sorted(name for name in finished.files if not _NAME.fullmatch(name)):
        raise ProcedureError(
            f"the result has a file {texts.quote(odd[0])}; expected a name of letters, digits, '_', '-' and '.'"
        )
    found = ProcedureResult(num_sites, num_steps, finished.result, finished.files)
    contents = {RESULT: found.to_json(), **{_FILES + name: content for name, content in found.files.items()}}
    return Parameters.from_arrays({name: np.frombuffer(each, np.uint8) for name, each in contents.items()})


def read_result(model: Parameters) -> ProcedureResult | None:
    """Return the result that a version has; None for the message of a step. Raises `ProcedureError`."""
    if RESULT not in model:
        return None
    files: dict[str, bytes] = {}
    for name in model:
        file = name.removeprefix(_FILES)
        if name != RESULT and (file == name or not _NAME.fullmatch(file)):
            raise ProcedureError(f"the result has a tensor {texts.quote(name)}; expected its JSON and files")
        if model[name].dtype != np.uint8:
            raise ProcedureError(f"the tensor {texts.quote(name)} of a result is {model[name].dtype}; expected bytes")
        if name != RESULT:
            files[file] = model[name].tobytes()
    try:
        found = msgspec.json.decode(model[RESULT].tobytes(), type=prepare_type(_Summary))
    except msgspec.MsgspecError as exc:
        raise ProcedureError(f"the result is not valid JSON of a procedure: {exc}") from exc
    return ProcedureResult(found.sites, found.steps, found.result, files)
