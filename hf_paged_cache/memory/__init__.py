"""Bytes and tensors: the budget, the pools of layers and groups, moving blocks. No sequences."""
