"""A decoded row as the document contract has it (DESIGN §5), before anything looks at its words. A row walks down this list:

``bad_row``    why a row is dropped
``mapping``    ``data.yaml: fields``: which column is what, by the name of the file
``recognise``  rows of known shapes (ShareGPT, Alpaca, pairs …), and what of a row nothing reads
``calls``      tools, calls of them and reasoning as text
``chats``      messages of any of them as roles, texts and loss; what no template can show is refused
``told``       what was read as what, counted over a shard and said to the person
"""
