"""Where it is decided what goes on: gather evidence, judge, record the verdict.

``release`` judges a candidate, ``patch`` a patch, ``recipe`` one that changes what is learnt. Nothing in here can be patched by an
agent, and missing evidence never promotes.
"""
