"""The model: an estimator of scikit-learn. job.toml has the same values in `[simulation.model]`."""

from __future__ import annotations

from fedplat import Parameters
from fedplat.sklearn import SklearnLearner

import data

ESTIMATOR = "sklearn.linear_model:SGDClassifier"
OPTIONS = {"loss": "log_loss", "alpha": 0.001}


def initial() -> Parameters:
    """Return the initial model of the job."""
    learner = SklearnLearner(estimator=ESTIMATOR, options=OPTIONS, features=data.NUM_FEATURES, classes=data.NUM_CLASSES)
    return learner.initial(seed=0)
