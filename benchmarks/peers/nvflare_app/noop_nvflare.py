"""What NVFlare's stock workflow needs for rounds without training: an executor and a model of many arrays."""

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
    """Returns the weights that it got."""

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """No training: the model as it came."""
        steps = {MetaKey.NUM_STEPS_CURRENT_ROUND: 1}
        return DXO(DataKind.WEIGHTS, data=from_shareable(shareable).data, meta=steps).to_shareable()


class Arrays(ModelPersistor):
    """Like the stock NPModelPersistor, which knows one array; notes when each model was committed."""

    def __init__(self, model: str, times: str):
        """`model`: JSON of [[name, dtype, shape], ...]; `times` gets a line for each committed model."""
        super().__init__()
        self.model = model
        self.times = times

    def load_model(self, fl_ctx: FLContext) -> ModelLearnable:
        """Zeros."""
        self._note()
        tensors = json.loads(Path(self.model).read_text())
        return make_model_learnable({name: np.zeros(shape, dtype) for name, dtype, shape in tensors}, {})

    def save_model(self, model: ModelLearnable, fl_ctx: FLContext) -> None:
        """Writes the arrays where the stock one would, and then the moment."""
        folder = Path(fl_ctx.get_workspace().get_result_root(fl_ctx.get_job_id())) / "models"
        folder.mkdir(parents=True, exist_ok=True)
        np.savez(folder / "server.npz", **model[ModelLearnableKey.WEIGHTS])
        self._note()

    def _note(self) -> None:
        with open(self.times, "a") as file:
            file.write(f"{time.time()}\n")
