"""The state of a running factory, for a person, a log and a monitor.

``daemon_log``          logs/daemon.log, and the note of the daemon's current task
``daemon_state``        whether the daemon runs, and the progress of its segment
``status``              the facts of ``factory status``, from the ledger and this machine, and their lines
``waiting``             everything that waits for a person, with the command to type
``metrics``             the same facts as numbers, for Prometheus
``delivery_positions``  the last event that was delivered to each receiver of notifications
"""
