"""The gates decide whether a candidate is released and a patch is merged. They gather evidence, judge it and record the verdict.

``release`` judges a candidate, ``patch`` a patch, ``recipe`` a patch that changes what is learnt. The latter two run stages (``stage_interface``,
``staged_gate``). Agents cannot patch this folder, and missing evidence never promotes.
"""
