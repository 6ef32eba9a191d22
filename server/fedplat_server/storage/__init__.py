"""Bytes on the disk: the data folder, model files, the spool of updates, caches of reads."""
