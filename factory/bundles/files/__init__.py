"""A bundle's files: their paths (``layout``), reading them without trust (``folder``), their hashes (``manifest``)."""
