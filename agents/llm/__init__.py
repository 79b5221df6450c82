"""How agents speak to a language model, wherever it runs.

A ``Request`` (``exchange``) goes through the ``client``, which asks the ``Books`` whether the worst case is affordable, sends it to
an endpoint (``http_endpoint``: any OpenAI-compatible server; ``file_endpoint``: a person or a program that answers with
files), tries again where that can help, and hands the whole exchange to the books. ``policy`` says how much of everything;
``replay_server`` is a real server that plays recorded sessions, good and bad.
"""
