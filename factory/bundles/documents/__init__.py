"""The documents that are generated from a bundle's other files: model card, Croissant, SPDX. Each is a function of ``Facts``."""
