"""Makes a new workspace for ``factory init``, with a recipe, vocabulary, tokenizer and data policy that fit together.

``presets``        has the table of presets, and checks whether a recipe fits this machine
``new_workspace``  chooses the workspace's files, including a tokenizer.json that a person brings, and refuses files that do not fit together
"""
