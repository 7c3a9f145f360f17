"""How keys and values lie in the blocks of one layer: exact, 8-bit by token, groups of codes by block."""
