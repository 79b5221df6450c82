"""The work of the daemon as an ordered list of duties.

    table     the list; a duty's place in the list is its rank
    duty      the classes: a duty (``Duty``), the state that it looks at (``DutyState``), one errand (``DutyTask``)
    runner    the loop that does the duties (``run_duty_pass``: one pass; ``run_daemon``: the daemon)
    back_off  failures: a failed errand rests, twice as long each time, is reported once, and other errands continue
    listing   ``factory duties``: the list, with the due, resting and held duties, and when each was last done

To add a duty, add one file here (or an entry in the file of the same topic), and one line in ``table``. A duty is::

    ENLARGE = Duty(
        "enlarge",                           # its name, in requests of a person and in messages about failures
        "make pictures larger",              # for 'factory duties'
        due=lambda state: too_small(state.db), # subjects that wait, most urgent first: numbers or paths; (None,): it is due
        do=enlarge,                          # do(plant, subject): safe to repeat; its own transaction records it
        trains=True,                         # starts trainers, so it waits while training is paused
    )

``due`` reads the ledger at one moment (``state.db``). It must be quick, because each pass calls it until an earlier duty is due. It imports heavy
modules inside the function. It may return subjects that rest (``state.resting``). ``do`` gets the first subject that does not rest. After a kill at
any instruction, the next pass does the errand again. The runner repairs damaged inputs, backs off after failures, obeys pauses and the disk's floor,
answers requests, and refuses an errand that repeats without effect. A duty's file has only what is special to the duty.

Only the commands import this folder.
"""
