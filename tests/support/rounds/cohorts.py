"""What tests ask of a cohort."""

from __future__ import annotations

from typing import Any

from fedplat.rounds.persistent_map import PersistentMap


def num_copied(after: PersistentMap[Any]) -> int:
    """How many items the step that made this cohort copied: a few recent ones, or now and then all."""
    base, recent = (getattr(after, name) for name in ("_base", "_recent"))
    return len(recent) or len(base)
