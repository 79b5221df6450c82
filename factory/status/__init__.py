"""The state of a running factory, for a person, a log and a monitor.

``daemon_log``      logs/daemon.log, and the note of the daemon's current task
``daemon_state``  whether the daemon runs, and how far its segment is
``status``   the facts of ``factory status``, from the ledger and this machine; ``screen`` turns them into lines
``waiting``  everything that waits for a person, with the command to type
``metrics``  the same facts as numbers, for Prometheus
``delivery_positions`` how far each receiver of notifications was told
"""
