"""The recipe scout: reads the trunk's metrics and proposes a changed value of its recipe.

``course`` (what the metrics say) → ``changes`` (a declared list, each with a predicted gain) → ``scout`` (picks one that was
not rejected before). With a language model ``role`` replaces the pick: the model gets the same record, the declared list and
the earlier attempts. The gate's paired runs decide in both cases.
"""
