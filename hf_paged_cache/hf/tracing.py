"""What `torch.compile` must not look into."""

from functools import partial

import torch

untraced = partial(
    torch.compiler.disable, reason="a PagedCache keeps its block tables in Python and runs outside compiled graphs"
)
"""Lets a function run as it stands inside a compiled model, and whatever it calls; half a microsecond a call.

Block tables change from step to step. Traced, their contents would become guards, and steps compilations.
"""
