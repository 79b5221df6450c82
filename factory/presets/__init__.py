"""What ``factory init`` sets together: recipe, vocabulary, tokenizer and data policy of a new workspace.

``presets`` (the table; does a recipe fit this machine?) → ``making`` (which files the workspace gets, refused where they do not fit one
another; a tokenizer.json that somebody brings among them).
"""
