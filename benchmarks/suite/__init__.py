"""`make bench`: compare Paceline with other tools, on this machine, in one run.

models.py             the models, with their data, order, batch and optimizer
contenders.py         the tools that train them, and their commands (no torch)
talk.py               the protocol between a contender's processes and the measuring process (standard library)
torch_worker.py       a process of a contender that uses torch
tensorflow_worker.py  the process of tf.distribute, in a separate Python without torch
measure.py            starts the contenders of a model, checks that they compute the same, and times them alternately
figures.py            medians, ratios, intervals (no torch)
gpu.py                the part for a machine with a CUDA device, with benchmarks/gpu/steps.py
page.py               docs/benchmarks.md and its charts, from the JSON
"""
