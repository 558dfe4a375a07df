"""Replicas train independently, and their weights are averaged every few steps: local_sgd, diloco."""
