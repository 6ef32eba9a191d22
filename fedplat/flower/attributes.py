"""What a strategy remembers between rounds: its attributes."""

from __future__ import annotations

import pickle
from typing import Any

from flwr.serverapp.strategy import Strategy


def pickle_attributes(strategy: Strategy) -> bytes:
    """Return the attributes of a strategy, and of strategies inside it, except those that no file can hold.

    The others are functions and open resources, which are made again with the strategy.
    """
    found: dict[str, Any] = {}
    for name, value in vars(strategy).items():
        try:
            found[name] = (
                ("strategy", pickle_attributes(value)) if isinstance(value, Strategy) else ("", pickle.dumps(value))
            )
        except Exception:
            continue
    return pickle.dumps(found)


def assign_attributes(strategy: Strategy, attributes: bytes) -> None:
    """Give a new strategy the attributes of another one. They must come from `pickle_attributes` of this machine."""
    for name, (kind, content) in pickle.loads(attributes).items():
        inner = getattr(strategy, name, None)
        if kind and isinstance(inner, Strategy):
            assign_attributes(inner, content)
        elif not kind:
            setattr(strategy, name, pickle.loads(content))
