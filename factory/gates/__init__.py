"""The gates decide whether a candidate is released, and whether a patch is merged. They gather evidence, judge it and record the verdict.

``release`` judges candidates. ``patch`` judges patches. ``recipe`` judges patches of recipes that change what the model learns. The patch gate and
the recipe gate run stages (``stage_interface``, ``staged_gate``). Agents cannot patch this folder. Missing evidence never promotes.
"""
