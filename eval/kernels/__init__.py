"""The kernels without a model: speed, the search of the launch table, and what the compiler makes of them."""
