"""The loss doctor: an anomaly becomes a named cause. It sees a run only through the ``ReplayBench`` that it is handed.

``curves`` says whether a replayed window shows the anomaly again, ``arms`` lists the replays, each with one thing changed, ``suspects``
finds the documents without which it is gone, ``causes`` is the table from outcomes to causes (a pure function), ``doctor``
runs the arms from cheap to expensive and stops where the table has an answer. No language model is needed.
"""
