"""Prompts whose beginning is known: what reuse saves, and the prefix index alone."""
