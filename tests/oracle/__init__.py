"""What the product must equal, written for reading: numpy kernels, the numpy codec."""
