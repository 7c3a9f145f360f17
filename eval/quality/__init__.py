"""What caches make of a model's predictions, measured through the cache."""
