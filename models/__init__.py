"""Models as descriptions: what a decoder computes (``spec``), its RoPE (``rope``), its tensors (``tensors``), and its files (``adapters``).

Everything that must know a model's architecture reads it from a ``ModelSpec``: the trainer, the judge's reference model, the server, planning, export
and import. Nothing here trains or runs a model, and agents may not patch it.
"""
