"""Every function of the package in plain PyTorch: runs everywhere, and is the oracle of the other backends."""
