"""Record the spans of a run, in its processes.

tracer.py   observes the run, and wraps the functions that wait for other processes
"""
