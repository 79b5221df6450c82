"""Turns a decoded row into the form of the document contract (DESIGN §5), before the rules look at its text. The modules:

``bad_row``        defines the error that drops a row
``field_mapping``  reads ``data.yaml: fields``: the meaning of each column, by the name of the file
``row_shapes``     reads rows of known shapes (ShareGPT, Alpaca, pairs …), and notes the fields that are not used
``tool_calls``     writes tools, tool calls and reasoning as text
``tools_prompt``   has the text that offers tools to a model
``chats``          turns the messages of each shape into roles, texts and loss, and refuses fields that the chat template cannot show
``row_counts``     counts how the rows of a shard were read, and describes that to a person
"""
