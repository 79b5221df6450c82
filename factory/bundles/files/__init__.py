"""The files of a bundle: ``layout`` has their paths, ``folder`` reads them as untrusted input, and ``manifest`` compares their hashes."""
