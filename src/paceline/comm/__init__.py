"""Communication: collectives, the mesh, and sums between processes, devices and threads.

process_group.py, device_choice.py   the process group of a run, and the device of each process
mesh.py, replicas.py                 processes as named dimensions; the replicas of one global batch
collectives.py, transport.py         what all other code calls; torch.distributed below it
objects.py, wire.py, sockets.py      Python values and tensors as messages; ZeroMQ
reducers.py, codecs.py, codec_sums.py, endpoints.py, direct.py, link_cost.py   how ddp sums its buckets
shared_memory.py, copied_pages.py, neighbours.py   between processes of one machine
threads.py, devices.py               between replicas of one process
tree_sums.py, means.py, scalars.py, dtensor.py     kinds of sums and tensors
generators.py, fork_safety.py, waits.py            random states; forks beside gloo; what waits for others

Gloo tells a sender over the same connection that the other side is ready. That message queues behind what is being
sent. So code here posts its receives before its sends.
"""
