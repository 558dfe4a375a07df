"""Every strategy's checkpoint, at one number of replicas, read by every other at another."""
