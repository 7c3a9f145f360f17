"""What the measurements share: options, tables, the machine, timing, bytes and the caches that are compared."""
