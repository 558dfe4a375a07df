"""A run that is a trial of `paceline compare`, in its worker: what is measured of it, and where it ends.

order.py      what the worker is asked to do, from the environment
probe.py      takes the place of some of a run's methods: measures its steps, keeps it from writing, ends it
resources.py  peak memory, and bytes sent over the network
profiled.py   time in communication, from torch's profiler
"""
