"""Reads the data: order of the examples, shards of each process, and batches. Independent of the strategies.

batch_plan.py: the yields of a global batch on each process; order.py: the examples of each step;
sources.py, fetch.py, collating.py: from a data set to batches; loader.py: the object that the script iterates;
randomness.py, draws.py, noise.py: random draws that belong to an example or a shard, not to a process.
"""
