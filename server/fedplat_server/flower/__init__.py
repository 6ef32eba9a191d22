"""The ServerApps of Flower apps, each in its own process: `runs.py` is the daemon's side, `process.py` the app's."""
