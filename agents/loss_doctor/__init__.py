"""The loss doctor names the cause of an anomaly. It sees a run only through the ``ReplayBench`` that it is given.

``arms`` lists the replays of the anomaly's window, each with one thing changed. ``curves`` says whether a replayed window shows the anomaly
again. ``suspects`` finds the documents to blame. ``causes`` is the table from outcomes to causes, a pure function. ``doctor``
runs the arms from cheap to expensive and stops as soon as the table has an answer. No language model is needed.
"""
