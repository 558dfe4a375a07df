"""Measure a run for `paceline compare`, in the processes of a trial.

probe.py                  observes a run: times its steps, ends its script
communication_profile.py  seconds in communication, from torch's profiler
resources.py              peak memory, and bytes sent over the network
"""
