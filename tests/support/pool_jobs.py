"""Jobs whose updates a pool aggregates, and a spool of such updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs

from fedplat.aggregate import Contribution
from fedplat.codecs.container import Format
from fedplat.config.loaded_plugins import NO_PLUGINS, LoadedPlugins
from fedplat.job import parse_job
from fedplat.model import WINDOW, Parameters
from fedplat.rounds import JobState, ModelVersion
from fedplat_server.aggregation.backend import Aggregate, AggregationBackend
from fedplat_server.storage.blobs import BlobStore
from fedplat_server.workers.task_inputs import AttemptInputs, SpooledUpdate
from support import daemons
from support.jobs import job_file

SIZE = WINDOW + 5000
NUM_UPDATES = 5
BY_COLUMNS = "[pool]\nranks = 2\n"

PRIVATE = (
    '[updates]\nclip_norm = 3.0\nweighting = "uniform"\n'
    '[privacy]\nparticipation = "fixed"\ndelta = 1e-6\nnoise_multiplier = 0.5\n'
)

CLIPPED = "[updates]\nclip_norm = 3.0\n"
FEDADAM = '[aggregation]\nrule = "fedadam"\n'


def base_model(size: int = SIZE) -> Parameters:
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        "double": rng.normal(size=100),
        "weight": rng.normal(size=size - 200).astype(np.float32),
        "half": rng.normal(size=100).astype(np.float16),
        "steps": np.array([7, 8]),
    }
    return Parameters.from_arrays(arrays)


class Spool:
    """A folder with blobs and updates, and what a job makes of them, wherever it is computed."""

    def __init__(
        self, folder: Path, tables: str, base: Parameters | None = None, plugins: LoadedPlugins = NO_PLUGINS
    ) -> None:
        self.folder = folder
        self.blobs = BlobStore(folder / "blobs")
        text = job_file("toy", 2, NUM_UPDATES, more=tables, close="deadline" if "[privacy]" in tables else "goal")
        self.spec = parse_job(text, plugins.table)
        self.plugins = plugins
        base = base or base_model()
        model = self.blobs.put_chunks([base.to_bytes()])
        self.version = ModelVersion(0, 0, 0, model.digest, model.size_bytes)
        self.updates = [self._update(number, base) for number in range(NUM_UPDATES)]

    def _update(self, number: int, base: Parameters) -> SpooledUpdate:
        update = daemons.update_of(base, number)
        path, codec = self.folder / f"{number}.update", self.spec.compression.uplink
        content = [update.to_bytes()]
        if codec is not None:
            content = Format(codec, base.schema).encode(update, np.random.default_rng(1))
        path.write_bytes(b"".join(content))
        metrics = {"loss_before": 2.0 / (number + 1), "local_steps": 3.0 + number}
        return SpooledUpdate(str(path), Contribution(1.0, 10.0, metrics, client_id=f"c{number}"))

    def inputs(self) -> AttemptInputs:
        job = JobState("job", self.spec, self.version, plugins=self.plugins.find_used(self.spec))
        return AttemptInputs.of(job, self.blobs, self.plugins.references)

    async def done(self, folding: AggregationBackend) -> Aggregate:
        try:
            for update in self.updates:
                await folding.fold([update])
            return await folding.commit()
        finally:
            await folding.close()

    def accept(self, aggregate: Aggregate) -> None:
        self.version = structs.replace(
            self.version,
            version=self.version.version + 1,
            digest=aggregate.model.digest,
            state_digest=aggregate.state.digest if aggregate.state else "",
        )

    def model(self, aggregate: Aggregate) -> np.ndarray[Any, Any]:
        return Parameters.open(self.blobs.path(aggregate.model.digest)).to_vector()


JOBS = {
    "fedadam with clipping": FEDADAM + CLIPPED,
    "adaptive clipping": CLIPPED.replace("clip_norm = 3.0", "adaptive_clip = {initial_norm = 300.0}"),
    "private": FEDADAM + PRIVATE,
    "median": FEDADAM + '[robust]\nbyzantine = 1\nrule = {name = "median"}\n',
    "krum": FEDADAM + '[robust]\nbyzantine = 1\nrule = {name = "krum"}\n',
    "qfedavg, encoded": '[aggregation]\nrule = "qfedavg"\n[compression]\nuplink = {codec = "quantize", bits = 8}\n',
    "downlink": FEDADAM + '[compression]\ndownlink = {codec = "eden"}\n',
}
