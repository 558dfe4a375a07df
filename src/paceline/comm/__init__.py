"""Communication: groups, the mesh, and sums between processes, devices and threads.

process_group.py, device_choice.py   the process group of a run, and the device of each process
mesh.py, group.py                    processes as named dimensions; groups and their operations
replicas.py, gathering.py, same_bits.py   differentiable sums; tensors of unequal length; checks for equal bits
transport.py                         calls torch.distributed
objects.py, wire.py, sockets.py      Python values and tensors as messages; ZeroMQ
reducers.py, codecs.py, codec_sums.py, endpoints.py, direct.py   how ddp sums its buckets
shared_memory.py, copied_pages.py, neighbours.py   communication between processes of one machine
threads.py, devices.py               communication between replicas of one process
tree_sums.py, means.py, scalars.py, dtensor.py     kinds of sums and tensors
generators.py, fork_safety.py, waits.py            random states; safe forks with gloo; a list of blocking functions

Gloo sends its "ready to receive" message over the same connection as outgoing data, so the message queues behind that
data. Therefore code here posts its receives before its sends.
"""
