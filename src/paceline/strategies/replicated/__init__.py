"""Every replica holds the whole model: ddp, shared, data_parallel, mirrored, central_storage, and `reproducible`.

ddp:
- Gloo's threads release a collective's tensors shortly after the collective finishes. If the interpreter exits at that
  moment, the process aborts. So reducers release the process group when the run closes, and comm/process_group.py ends
  the group at exit.

shared:
- Nothing is summed during the backward, since each process has one core, and the backward uses it.
- At the barrier before the sum, each process passes a checksum of the list of parameters that have gradients. Only if
  the checksums differ do the processes exchange the lists. So used parameters need no separate comparison.

Several replicas in one process (replica_set.py):
- Within a global batch only updated weights are sent again: a graph that waits for its backward may still reference the
  other weights.
- The replicas' threads take turns. A replica that waited for its neighbour during its turn would wait for ever. So
  reductions other than native run in separate threads.

reproducible:
- Autograd has one thread per GPU. Two backwards that wait for each other in this thread deadlock. So each backward runs
  in its caller's thread (set_multithreading_enabled).
- Autocast's cache is off. It belongs to the process, and the first shard that finishes would empty it. Then weights
  would be cast again for some shards, and the gradients of these shards rounded differently.
- A norm adds in blocks that begin at aligned addresses. So gradients that are views are copied to separate memory.
"""
