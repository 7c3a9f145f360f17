"""Blocks that outlive a call, found again by their tokens: the store, its sessions, its index and its files."""
