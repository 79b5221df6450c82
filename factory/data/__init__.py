"""Finds all uses of a document, and removes documents. ``factory.erasing`` erases their text.

``selecting``           finds the documents that a person names
``exposure``            computes from the data order at which steps a segment was trained on a document
``retraining_cost``     estimates the cost of training again without some documents
``metrics``             reads the metrics of a segment's steps
``removing``            removes documents or puts them back: rows and events, in one transaction
``relabelling``         gives documents another domain, source, licence or group
``licence_settlement``  settles which licence of a text is right
``synthetic``           finds the documents that models wrote
``listing``             lists the data
"""
