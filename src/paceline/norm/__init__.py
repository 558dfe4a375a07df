"""Batch norm over the global batch. Biases before batch norm, which have no effect, get zero gradients."""
