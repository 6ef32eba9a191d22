"""What a tokenizer does, as a digest: equal tokens mean the same on all participants only if it is equal."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, cast

from fedplat.errors import ModelError

_OF_A_CALL = frozenset({"version", "truncation", "padding"})
"""What the file of a tokenizer also has: its format, and the options of the last call."""


def tokenizer_sha256(tokenizer: Any) -> str:
    """Return the SHA-256, in hex, of a tokenizer's vocabulary, rules, special tokens and chat template.

    It takes those of transformers and of the package `tokenizers`. Versions of these packages write the same rules in
    different ways, as far as that is known: with keys whose value is null or false, and merges as texts. Raises
    `ModelError` for another object.
    """
    described = {
        "rules": _describe_rules(tokenizer),
        "special": {name: _name(token) for name, token in getattr(tokenizer, "special_tokens_map", {}).items()},
        "chat": getattr(tokenizer, "chat_template", None),
    }
    text = json.dumps(_simplify(described), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def check_tokenizer(tokenizer: Any, expected: str, *, is_required: bool = True) -> None:
    """Raise `ModelError` unless a tokenizer, or None, is the one whose SHA-256 a job states; "" if it states none.

    A job has to state that of a trainer with a tokenizer if it `is_required`.
    """
    if tokenizer is None:
        if expected:
            raise ModelError(
                f'config.tokenizer_sha256 = "{expected}": the trainer here does not name the tokenizer of its data; '
                "expected one with tokenizer=..."
            )
        return
    found = tokenizer_sha256(tokenizer)
    if not expected and is_required:
        raise ModelError(
            "the job does not state the tokenizer that its model is for; expected tokenizer_sha256 in its [config]. "
            f"The one here has the SHA-256 {found}"
        )
    if expected and found != expected:
        raise ModelError(
            f'config.tokenizer_sha256 = "{expected}": the tokenizer here has the SHA-256 {found}; expected the same '
            "tokenizer on all participants"
        )


def _describe_rules(tokenizer: Any) -> Any:
    inner = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if callable(write := getattr(inner, "to_str", None)):
        rules: dict[str, Any] = json.loads(cast(str, write()))
        return {name: value for name, value in rules.items() if name not in _OF_A_CALL}
    if callable(list_tokens := getattr(tokenizer, "get_vocab", None)):  # one in Python
        return {"vocab": list_tokens(), "class": type(tokenizer).__name__}
    raise ModelError(
        f"the tokenizer is a {type(tokenizer).__name__}; expected one of transformers or of the package tokenizers"
    )


def _simplify(value: Any) -> Any:
    """Return a value of JSON as all versions write it."""
    if isinstance(value, Mapping):
        named = cast(Mapping[str, Any], value).items()
        return {
            name: _split_merges(each) if name == "merges" else _simplify(each)
            for name, each in named
            if each is not None and each is not False
        }
    return [_simplify(each) for each in cast(list[Any], value)] if isinstance(value, list) else value


def _split_merges(merges: Any) -> Any:
    return [each.split(" ", 1) if isinstance(each, str) else each for each in merges]


def _name(token: Any) -> Any:
    return [str(each) for each in cast(list[Any], token)] if isinstance(token, list) else str(token)
