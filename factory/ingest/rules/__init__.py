"""Defines the keys of ``policies/data.yaml``, and the rules that drop, change or hold out documents."""
