"""Federated training of scikit-learn's estimators (extra "sklearn").

`learner.py` is the learner; `estimators.py` trains estimators by steps, and computes the sums of those whose fit needs
nothing but sums. Models are arrays only: nothing is pickled.
"""

from __future__ import annotations

from fedplat.sklearn.learner import SklearnLearner

__all__ = ["SklearnLearner"]
