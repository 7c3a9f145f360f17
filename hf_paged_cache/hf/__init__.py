"""What transformers sees of a cache, and what the cache learns from transformers. Padding and columns end here."""
