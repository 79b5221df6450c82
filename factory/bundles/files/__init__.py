"""A bundle's files: where each lies, how they are read without trust, the manifest that names them."""
