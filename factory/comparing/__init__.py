"""Metrics of another run over ours, step by step (``factory compare``).

``reading``    a file, a segment's folder or a segment's lineage as curves
``comparing``  two curves on one grid: the first place where they part
``page``       the picture
"""
