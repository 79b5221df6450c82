"""The documents of a bundle that follow from its other files: model card, Croissant, SPDX. Each is a function, so that anyone can make it again."""
