"""Turns a decoded row into the form of the document contract (DESIGN §5), before the rules look at its text. A row passes these modules:

``bad_row``       the error that drops a row
``field_mapping``       ``data.yaml: fields``: the meaning of each column, by the name of the file
``row_shapes``     rows of known shapes (ShareGPT, Alpaca, pairs …), and the fields that nothing reads
``tool_calls``         tools, tool calls and reasoning as text
``tools_prompt``  the text that offers tools to a model
``chats``         the messages of each shape as roles, texts and loss; refuses anything that no template can show
``row_counts``          how the rows of a shard were read, counted and described to a person
"""
