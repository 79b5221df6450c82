"""How agents ask a language model, wherever it runs.

A ``Request`` (``exchange``) goes through the ``client``, which reserves its worst case in the ``BudgetBooks``, sends it to an endpoint
(``http_endpoint``: any OpenAI-compatible server; ``file_endpoint``: a person or a program that answers with files), tries again where
that can help, and gives the exchange to the books. ``policy`` has the model, the limits and the budgets.
"""
