"""Tasks of lm-evaluation-harness, read through a cache."""
