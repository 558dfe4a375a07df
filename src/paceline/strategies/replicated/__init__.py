"""Every replica holds the whole model: ddp, shared, data_parallel, mirrored, central_storage, and `reproducible`."""
