"""Speed and memory of caches in `generate` on a model."""
