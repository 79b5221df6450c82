"""Any tokenizer of a Hugging Face folder, used as it is.

``description``      reads a tokenizer's folder: its library's file, its special ids, how documents begin and end, its chat template
``marked_library``   the tokenizer's own library, in which no text can spell a special token
``fast_path``        a faster way to the same ids for ASCII text, where it was proven equal
``chat_rendering``   renders a chat template, which is untrusted, within bounds
``answer_spans``     finds the assistant's answers in a rendered chat
``turn_grammar``     reads the turns of a chat back from its text
``model_format``     encodes and decodes documents with all of these
"""
