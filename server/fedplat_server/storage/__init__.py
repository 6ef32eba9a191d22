"""Files on the disk: the data folder, models (blobs), the spool of updates, and caches of reads."""
