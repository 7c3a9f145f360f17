"""Why something could not be measured, in words that may be passed on to others."""

from __future__ import annotations

import re


def reason(error: Exception) -> str:
    """Type and first line, with folders cut off."""
    first_line = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {re.sub(r'(/[^/ ]+)+/', '', first_line)}"
