"""What the daemon does, as one list of duties: what is due, in which order, and what holds it.

    table     the list: read it to know what the daemon does; a duty's place in it is its rank
    duty      what a duty says of itself (``Duty``), what it is asked (``Look``), and one thing to do now (``Errand``)
    runner    the one loop that does them (``work``: a pass; ``run``: the daemon)
    back_off    what becomes of one that fails: it rests, longer each time, is said once, and the others go on
    listing   ``factory duties``: the list with what is due, rests, is held, and when each was last done

To add a duty: one file here (or an entry in the file whose idea it is), and one line in ``table``. A duty is::

    ENLARGE = Duty(
        "enlarge",                           # its name: a person asks for it so, and what fails is said of it
        "make pictures larger",              # for 'factory duties'
        due=lambda look: too_small(look.db), # what waits, the most urgent first: numbers or paths; (None,) for 'it is due'
        do=enlarge,                          # do(plant, subject): safe to repeat; its own transaction records it
        trains=True,                         # starts trainers: waits while training is paused
    )

``due`` reads the ledger at one moment (``look.db``) and is quick: it is called in each pass, until something earlier in the list is due. It
imports what is heavy where it uses it. What is not to be tried now (``look.resting``) need not be left out. ``do`` is handed the first subject
that does not rest. Killed at any instruction, the next pass does it again. Mending damaged inputs, back-off, pauses, the disk, requests of a
person and the refusal of a duty that repeats without effect are the runner's; what is special to one duty is in that duty's file.

No other room imports this one but the commands.
"""
