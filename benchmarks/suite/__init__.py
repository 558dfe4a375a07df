"""`make bench`: Paceline beside other tools, on this machine, in one run.

models.py             what is trained: each model once, with its data, their order, batch and optimizer
contenders.py         who trains it, and how it is started (no torch)
talk.py               what the processes of a contender and the measuring process say to each other (standard library)
torch_worker.py       a process of a contender that uses torch
tensorflow_worker.py  the process of tf.distribute, run by a Python of its own, which has no torch
measure.py            starts the contenders of a model, checks that they compute the same, and times them in turn
figures.py            medians, ratios, intervals (no torch)
gpu.py                the part for a machine with a CUDA device, by benchmarks/gpu/steps.py
page.py               docs/benchmarks.md and its charts, from the JSON
"""
