"""The core of fedplat: models, job files, the pure coordinator and the aggregate algebra."""

__version__ = "0.1.0"
