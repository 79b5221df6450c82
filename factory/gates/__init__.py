"""Whether a candidate is released and a patch is merged: gather evidence, judge it, record the verdict.

``release`` judges a candidate, ``patch`` a patch, ``recipe`` a patch that changes what is learnt. The latter two run stages (``case``,
``staged_gate``). Agents can patch nothing in here, and missing evidence never promotes.
"""
