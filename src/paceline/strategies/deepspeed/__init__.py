"""DeepSpeed's ZeRO, with its settings file."""
