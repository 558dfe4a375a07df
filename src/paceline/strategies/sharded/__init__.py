"""Every process holds a shard of the parameters or of the optimizer state: fsdp (ZeRO 1 to 3, HSDP), fsdp+tensor."""
