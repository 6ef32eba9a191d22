"""The metrics of a fitted estimator on examples."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fedplat.learner import Data

_SMALLEST = 1e-15
"""The least probability of an answer: its logarithm is finite."""


def score_classifier(fitted: Any, data: Data) -> dict[str, float]:
    """Return `accuracy` and `loss`, the mean log loss, or hinge loss if the estimator gives no probabilities."""
    inputs, targets = data
    answers: npt.NDArray[np.int64] = np.searchsorted(fitted.classes_, targets)
    rows = np.arange(len(targets))
    with np.errstate(divide="ignore", invalid="ignore"):  # a class without examples has probability 0
        if hasattr(fitted, "predict_proba"):
            scores = np.nan_to_num(fitted.predict_proba(inputs))
            losses = -np.log(np.maximum(scores[rows, answers], _SMALLEST))
        else:
            scores = np.asarray(fitted.decision_function(inputs))
            if scores.ndim == 1:
                scores = np.column_stack([-scores, scores]) / 2
            others = scores.copy()
            others[rows, answers] = -np.inf
            losses = np.maximum(0.0, 1.0 - scores[rows, answers] + others.max(1))
    return {"loss": float(losses.mean()), "accuracy": float((scores.argmax(1) == answers).mean())}


def score_regressor(fitted: Any, data: Data) -> dict[str, float]:
    """Return `loss`, the mean squared error, and `r2` unless all targets are equal."""
    inputs, targets = data
    squares = (fitted.predict(inputs) - targets) ** 2
    variance = float(np.var(targets))
    metrics = {"loss": float(squares.mean())}
    return {**metrics, "r2": 1.0 - metrics["loss"] / variance} if variance else metrics
