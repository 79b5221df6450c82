"""Commands about data: ingest, generate, list, remove, relabel, provenance and compare. ``factory.cli`` adds them to the app."""
