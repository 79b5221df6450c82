"""Serves the champion at an OpenAI-compatible address, and replaces it by the next champion without losing a request.

Path of a request: ``router`` (key, retries, metrics) → the current engine, a process of its own, which is vLLM (``vllm``) or ``native``
(``api`` reads the request, ``engine_loop`` → ``batch`` → ``decoder`` make tokens, ``replies`` formats them). Path of a release: ``champion``
(read from the ledger) → ``supervisor`` starts an engine (``engines``), checks the export's hash, compares the engine with ``fixture`` (the answers
of the judge's model), warms the engine up, makes it current, drains the old engine and stops it. ``serve`` runs all of it.
"""
