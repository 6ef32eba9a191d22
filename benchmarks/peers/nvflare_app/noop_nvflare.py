"""The app of NVFlare's stock workflow for rounds without training: an executor and a model of many arrays."""

import json
import time
from pathlib import Path

import numpy as np
from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.executor import Executor
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.model import ModelLearnable, ModelLearnableKey, make_model_learnable
from nvflare.app_common.abstract.model_persistor import ModelPersistor


class NoopExecutor(Executor):
    """An executor that returns the weights that it received."""

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """Return the model unchanged."""
        steps = {MetaKey.NUM_STEPS_CURRENT_ROUND: 1}
        return DXO(DataKind.WEIGHTS, data=from_shareable(shareable).data, meta=steps).to_shareable()


class Arrays(ModelPersistor):
    """A persistor like the stock NPModelPersistor, but for many arrays. It records the time of each commit."""

    def __init__(self, model: str, times: str):
        """`model`: JSON of [[name, dtype, shape], ...]; `times` gets a line for each committed model."""
        super().__init__()
        self.model = model
        self.times = times

    def load_model(self, fl_ctx: FLContext) -> ModelLearnable:
        """Return zeros."""
        self._note()
        tensors = json.loads(Path(self.model).read_text())
        return make_model_learnable({name: np.zeros(shape, dtype) for name, dtype, shape in tensors}, {})

    def save_model(self, model: ModelLearnable, fl_ctx: FLContext) -> None:
        """Write the arrays where the stock persistor would, and then the time."""
        folder = Path(fl_ctx.get_workspace().get_result_root(fl_ctx.get_job_id())) / "models"
        folder.mkdir(parents=True, exist_ok=True)
        np.savez(folder / "server.npz", **model[ModelLearnableKey.WEIGHTS])
        self._note()

    def _note(self) -> None:
        with open(self.times, "a") as file:
            file.write(f"{time.time()}\n")
