"""Generates three documents from a bundle's other files: model card, Croissant and SPDX. Each is a function of ``BundleFacts``."""
