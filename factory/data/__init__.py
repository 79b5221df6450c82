"""Finds everything that a document was used for, and takes documents out. ``factory.erasing`` erases their text.

``selecting``    find the documents that a person names
``exposure``     compute from the data order at which steps a segment was trained on a document
``retraining_cost``         the cost of training again without documents
``metrics``      the metrics of a segment's steps
``removing``     take documents out, or put them back: rows and events, in one transaction
``relabelling``  give documents another domain, source, licence or group
``licence_settlement``     settle which licence of a text is right
``synthetic``    find the documents that models wrote
``listing``      list the data
"""
