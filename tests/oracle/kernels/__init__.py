"""The native kernels in plain numpy, with the extension's signatures: every instruction set must equal them."""
