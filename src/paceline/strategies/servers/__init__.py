"""The two sides of `parameter_server`, and the messages between them.

    work_queue.py          which chunks of a pass are free: pure, without sockets
    served_parameters.py   a server's parameters, and the user's optimizers for them
    serving.py             the loop of a server
    worker_links.py        a worker's connections to the servers: requests, chunks to compute
    remote_parameters.py   a worker's view of the parameters that servers own: sending, pulling

Each message of a worker is a request that gets one answer, at once or when the other workers have come. It is a JSON
header with "op", and tensors (comm/wire.py):

    op         to            request                                                 answer
    set        owners        store these weights (and this optimizer state)          done
    pull       owners        weights, by name                                        the weights
    push       all           add this shard's gradients to those of all workers      their sums, once all have come
    update     all           update optimizer i with these gradients, this           its weights, once all have come
                             worker's share, and this setting
    apply      all           update optimizer i with this gradient at once           its weights
    state      all           the optimizers' state                                   the tensors
    begin      first         open a pass over the data                               done
    chunk      first         a chunk of the pass to compute                          a chunk, none, or "over"
    admit      first         may a gradient from version v be applied?               yes or no, the version
    pool       first         add sums, or take them out                              the sums
    again      all           another `prepare` is coming: run on to it               when the server is there
    bye        all           this worker has ended                                   (none)

When a worker is lost, each server sends the others an error in place of an answer, and ends.
"""
