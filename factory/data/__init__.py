"""From a document to everything that it touched, and out again. Erasing its text is in ``factory.erasing``.

``selecting``  which documents a person means
``exposure``   at which steps a segment was trained on a document, worked out again from the data order
``cost``       what training again without documents takes
``metrics``    of a segment's steps
``removing``   documents are taken out, and back: rows and events, in one transaction
``listing``    what data there is
"""
