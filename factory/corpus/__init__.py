"""Makes a corpus of the running interpreter's standard library: real text that every machine has, under one licence.

The corpus has three domains that quote one another, as real domains do:

``code``  every source file, tests included
``docs``  docstrings, rendered as reference pages of 0.5–6 KB, and the topics of Python's own help
``chat``  questions and answers grounded in docstrings and signatures; "write the signature" is answered in Python

``write_english_shards`` makes shards of two further domains from the descriptions of installed packages: ``english``, and ``untrained-english``, of
other packages, which shows what a training that never reads it changes.

Modules are read as text and parsed, never imported. A hash of a module's path assigns the module, with all its documents, to the first shards
(``code-00`` …) or to the later shards (``code-01`` …), which arrive while the factory runs. Documents are sorted by a hash, so that the first rows of
a shard are a fair sample. The same interpreter gives the same bytes.
"""

from factory.corpus.bad_shard import write_bad_shard
from factory.corpus.english import write_english_shards
from factory.corpus.shards import write_corpus

__all__ = ["write_bad_shard", "write_corpus", "write_english_shards"]
