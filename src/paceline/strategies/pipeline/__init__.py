"""Every process holds some of the layers, and micro-batches flow through them."""
