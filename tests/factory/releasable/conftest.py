"""Rows to ingest as a shard, as the tests of ingest do."""

from tests.factory.ingest.conftest import ingest, write_shard

__all__ = ["ingest", "write_shard"]
