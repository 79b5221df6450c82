"""Serves the champion at an OpenAI-compatible address, and switches to the next champion without losing a request.

A request goes to ``router`` (key, retries, metrics), and from there to the current engine. An engine is a separate process: vLLM (``vllm``) or
``native``, where ``api`` reads the request, ``engine_loop``, ``batch`` and ``decoder`` make tokens, and ``replies`` formats them.

A release is read from the ledger by ``champion``. Then ``supervisor`` starts an engine (``engines``), checks the export's hash, compares the engine
with the answers of the judge's model (``parity_fixture``), warms the engine up, makes it current, drains the old engine and stops it. ``serve``
runs the router and the supervisor.
"""
