"""Makes a corpus of the running interpreter's standard library: real text that every machine has, under one licence.

It has three domains that quote one another, as real domains do:

``code``  every source file, tests included
``docs``  docstrings, rendered as reference pages of 0.5–6 KB, and the topics of Python's own help
``chat``  questions and answers grounded in docstrings and signatures; "write the signature" is answered in Python

Modules are read as text and parsed, never imported. A hash of its path assigns each module, with all its documents, to the
first shards (``code-00`` …) or to the later shards (``code-01`` …), which arrive while the factory runs. Documents are in
the order of a hash, so that the head of a shard is a fair sample. The same interpreter gives the same bytes.
"""

from factory.corpus.bad import write_bad_shard
from factory.corpus.shards import write_corpus

__all__ = ["write_bad_shard", "write_corpus"]
