"""Rate against divergence: texts nobody was calibrated on, their exact contexts, curves of codecs, and the plot."""
