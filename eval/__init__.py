"""Measurements of speed, memory and quality, one folder a command: `python -m eval.speed --help`, from the repository.

`common` is what they share; it imports none of them.
"""
