"""What a person calls: the command line, the demonstration, small models and the warmup of kernels."""
