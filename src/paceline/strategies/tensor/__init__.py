"""Every process holds a part of each layer."""
