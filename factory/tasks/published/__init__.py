"""Benchmarks as the world publishes them: how each file is recognised, and what its records are as items of ours.

A description is a ``Benchmark`` (``form``): the fields of its records, one ``Form`` for each way in which it is published, and the keys of a
task file that make it what papers and lm-eval 0.4.13 measure. ``choices`` has MMLU, ARC and HellaSwag, ``worked`` GSM8K and MATH, ``programs``
HumanEval, MBPP and BigCodeBench. ``benchmarks`` finds the one whose fields a file has and turns its records into items. This room reads
records alone: files, tasks and models are above it.
"""
