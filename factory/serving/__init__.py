"""Serves the champion over an OpenAI-compatible address, and replaces it by the next one without losing a request.

A request walks: ``router`` (key, retry, metrics) → the engine that is current, a process of its own: ``native`` (``api`` reads the request,
``engine_loop`` → ``batch`` → ``decoder`` + ``sampling`` make tokens, ``replies`` words them) or vLLM (``vllm``). A release walks:
``champion`` (what the ledger says) → ``swap`` starts an engine (``engines``), holds it to the export's hash and to ``fixture`` (what the
judge's own model says), warms it up, flips the router, drains the old engine and stops it. ``serve`` runs it all.
"""
