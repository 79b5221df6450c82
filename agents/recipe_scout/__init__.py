"""The recipe scout, no language model: reads how the trunk's loss went and proposes one changed line of its recipe.

course (what the record says) → changes (a declared list, each with a predicted gain) → scout (picks one that was not
rejected before) → lines (the edit: one value, comments kept). The gate's paired runs decide.
"""
