"""Batch norm over the global batch, and parameters whose gradient is zero but for rounding (biases before it)."""
