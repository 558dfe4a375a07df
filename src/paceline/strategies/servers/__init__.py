"""The two sides of `parameter_server`, and the messages between them.

    work_queue.py          who has taken part in an exchange, and which chunks of a pass are free: pure, without sockets
    served_parameters.py   a server's parameters, and the user's optimizers for them
    serving.py             the loop of a server
    worker_links.py        a worker's connections to the servers: requests, exchanges, chunks to compute
    remote_parameters.py   a worker's view of the parameters that servers own: sending, pulling
    rejoining.py           a worker that comes in the place of one that was killed

Each message of a worker is a request that gets one answer, at once or when other workers have come. It is a JSON header
with "op", and tensors (comm/wire.py). Workers meet at server 0, the first:

    op         to            request                                                 answer
    set        owners        store these weights (and this optimizer state)          done
    pull       owners        weights, by name                                        the weights
    push       owners        store this shard's gradients, of reduction k            done
    sum        owners        the sum of reduction k over these workers, in order     the gradients
    final      owners        the gradients as the update is to use them              done
    update     owners        make update k of optimizer i, once, with this setting   its weights
    apply      owners        update optimizer i with this gradient, once per chunk   its weights
    state      owners        the optimizers' state                                   the tensors
    exchange   first         everyone's bytes, once all live workers have come       the bytes
    begin      first         open a pass over the data                               done
    chunk      first         a chunk of the pass to compute                          a chunk, none, or "over"
    admit      first         may a gradient from version v be applied?               yes or no, the version
    pool       first         add sums, or take them out                              the sums
    join       first         admit me, at an exchange whose members allow it         its number, the members
    join       others        I have been admitted                                    done
    missing    first         which workers have not come, after a long wait          ranks
    again      all           another `prepare` is coming: run on to it               when the server is there
    bye        all           this worker has ended                                   (none)
"""
