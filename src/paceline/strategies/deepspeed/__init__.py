"""DeepSpeed's ZeRO, with its own settings file."""
