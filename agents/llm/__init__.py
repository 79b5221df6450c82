"""How agents ask a language model, wherever it runs.

The ``client`` reserves the worst case of a ``Request`` (``exchange``) in the ``BudgetAccount``, and sends the request to an endpoint. An
endpoint is any OpenAI-compatible server (``http_endpoint``), or a person or program that answers with files (``file_endpoint``). The client
tries again if that can help, and records each exchange in the account. ``policy`` has the model, the limits and the budgets.
"""
