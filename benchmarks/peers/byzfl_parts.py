"""byzfl's aggregators and attacks without its `__init__`, which imports the data sets of torchvision."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path

package = types.ModuleType("byzfl")
package.__path__ = [str(Path(importlib.util.find_spec("byzfl").origin).parent)]
sys.modules["byzfl"] = package
for name in ("aggregators", "attacks"):
    part = types.ModuleType(f"byzfl.{name}")
    part.__path__ = [f"{package.__path__[0]}/{name}"]
    sys.modules[f"byzfl.{name}"] = part

from byzfl.aggregators import aggregators, preaggregators  # noqa: E402

sys.modules["byzfl.aggregators"].Average = aggregators.Average
sys.modules["byzfl.aggregators"].Clipping = preaggregators.Clipping

from byzfl.attacks import attacks  # noqa: E402

__all__ = ["aggregators", "attacks", "preaggregators"]
