"""Which examples each process reads, in which order, and how they become batches. Below every strategy.

batch_plan.py: which yields of a global batch a process gets; order.py: the examples of each step;
sources.py, fetch.py, collating.py: from a data set to batches; loader.py: what the script iterates;
randomness.py, draws.py, noise.py: random draws that belong to an example or a shard, not to a process.
"""
