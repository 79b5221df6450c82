"""The recipe scout: reads how the trunk's loss went and proposes a changed value of its recipe.

course (what the record says) → changes (a declared list, each with a predicted gain) → scout (picks one that was not
rejected before) → lines (the edit: one value, comments kept). With a language model ``role`` stands in for the pick: it is told the same
record, the declared list and what was tried (``prompts``), and ``draft`` reads what it says. The gate's paired runs decide either way.
"""
