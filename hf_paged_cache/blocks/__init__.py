"""Block ids, tables of rows, and which blocks a row reads exactly. Numbers only: no tensors, no bytes."""
