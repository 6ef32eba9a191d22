"""The version of the distribution, in a module that imports nothing."""

__version__ = "0.2.0.dev0"
