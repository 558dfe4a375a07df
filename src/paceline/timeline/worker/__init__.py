"""What records the spans of a run, in its processes.

tracer.py   replaces some methods of the run, of its strategy, and the functions that wait for other processes
"""
