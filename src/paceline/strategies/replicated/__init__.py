"""Every replica holds the whole model: ddp, shared, data_parallel, mirrored, central_storage, and `reproducible`.

ddp:
- After a collective gloo's threads drop its tensors a moment later. If the interpreter ends then, the process aborts.
  So reducers release the group when the run closes, and comm/process_group.py ends it at exit.

shared:
- Nothing is summed during the backward. Each process has one core, which the backward uses.
- The used parameters need no comparison of their own: at the meeting before the sum each process shows a checksum of
  the parameters that have gradients. Only where these differ do the processes exchange more.

Several replicas in one process (replica_set.py):
- Weights are sent again only after an update: a graph that waits for its backward may hold the others.
- Reductions that are not native have threads of their own. A replica that waits for its neighbour while it holds the
  turn would wait for ever.

reproducible:
- On a GPU autograd has one thread for each device. Two backwards that wait for each other there never end. So each
  runs in its caller's thread (set_multithreading_enabled).
- Autocast's cache belongs to the process, and the first shard that ends empties it. So it is off: otherwise weights
  would be cast again for some shards, and their gradients rounded otherwise.
- A norm adds in blocks from where memory is aligned. So gradients that are views are copied to memory of their own.
"""
