"""The operator whose call a task serves."""

from __future__ import annotations

import contextvars

from fedplat_server.records.operators import OperatorRecord, Role

_operator: contextvars.ContextVar[OperatorRecord] = contextvars.ContextVar("operator")


def set_operator(operator: OperatorRecord) -> None:
    """Note the operator whose call this task serves."""
    _operator.set(operator)


def current_operator() -> str:
    """Return the name of the operator whose call this task serves."""
    return _operator.get().name


def current_role() -> Role:
    """Return the role of the operator whose call this task serves."""
    return _operator.get().role
