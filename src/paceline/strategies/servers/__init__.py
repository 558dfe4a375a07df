"""The two sides of `parameter_server`, and the messages between them.

    work_queue.py          the chunks of a pass that are free, in flight or finished; without sockets
    served_parameters.py   a server's parameters, and the user's optimizers for them
    serving.py             the loop of a server
    worker_links.py        a worker's connections to the servers: requests, chunks to compute
    remote_parameters.py   a worker's view of the parameters on servers: sending, pulling

Each message of a worker is a request: a JSON header with "op", and tensors (comm/wire.py). The server answers at once,
or after all workers have sent the same request:

    op         to            request                                                 answer
    set        owners        store these weights (or this optimizer state)           done
    pull       owners        send the weights with these names                       the weights
    push       all           add this shard's gradients to those of all workers      the sums, after all pushes
    update     all           update optimizer i with this worker's share of the      its weights, after all updates
                             gradients, and with this setting
    apply      all           update optimizer i with this gradient at once           its weights
    state      all           send the state of optimizer i                           the tensors
    begin      first         open a pass over the data                               done
    chunk      first         assign a chunk of the pass to this worker               a chunk, none, or "over"
    admit      first         may a gradient from version v be applied?               yes or no
    pool       first         add these sums to the pool, or empty the pool           the sums that were in the pool
    again      all           another `prepare` follows: run the script up to it      done, at the next `prepare`
    bye        all           this worker has ended                                   (none)

If a worker is lost, each server answers the other workers with an error, and ends.
"""
