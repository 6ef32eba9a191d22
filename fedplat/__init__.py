"""The core of fedplat: models, job files, the pure coordinator and the aggregation algebra."""

__version__ = "0.2.0.dev0"
