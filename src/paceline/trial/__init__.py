"""A run that is a trial of `paceline compare` or `verify`, in its worker: what is measured of it, and where it ends.

order.py      what the worker is asked to do, from the environment
probe.py      takes the place of some of a run's methods: measures its steps, keeps it from writing, ends it
recorder.py   likewise, for `paceline verify`: keeps what its steps compute
collated.py   digests of the examples; batches in reverse order
plain.py      dropout off; what is seen of a script through torch's functions
watched.py    numbers drawn, and gradients changed on the way
lines.py      what the lines of the script do, once a fault was found
script.py     which lines are the script's; what it is told of its rank
sketches.py   large tensors in few numbers, to be compared
kept.py       the recorder's files
resources.py  peak memory, and bytes sent over the network
profiled.py   time in communication, from torch's profiler
"""
