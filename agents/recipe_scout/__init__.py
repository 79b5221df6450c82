"""The recipe scout reads the trunk's metrics and proposes a changed value of its recipe.

``training_record`` (the facts from the metrics) → ``changes`` (the possible changes, each with a predicted gain) → ``scout`` (picks a change that was
not rejected before). With a language model, ``role`` replaces the pick: the model gets the same record, the same changes and the earlier
attempts. The gate's paired runs decide in both cases.
"""
