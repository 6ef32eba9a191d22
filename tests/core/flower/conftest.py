"""Tests of Flower apps are only collected where flwr is installed, since an environment without it is supported."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("flwr") else ["test_*.py"]
