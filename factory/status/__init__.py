"""What a person, a log and a monitor see of a running factory.

``log``      logs/daemon.log, and what the daemon is doing now
``running``  whether the daemon runs, and how far its segment is
``status``   the facts of ``factory status``: the ledger's, and those of this machine; ``screen`` shows them
``waiting``  what waits for a person, and the command to give
``metrics``  the same as numbers, for Prometheus
"""
