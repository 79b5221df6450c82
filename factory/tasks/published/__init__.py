"""Published benchmarks: recognises their files and converts their records to items of the factory.

A ``Benchmark`` (``record_form``) has a ``RecordForm`` for each published version of its records, and the keys of a task file with which papers and
lm-eval
0.4.13 measure it. ``choices`` has MMLU, ARC and HellaSwag, ``programs`` has HumanEval, MBPP and BigCodeBench, and ``benchmarks`` has GSM8K and
MATH and recognises files. This folder sees only records. Code above it reads files, makes tasks and runs models.
"""
