"""The two sides of `parameter_server`, and what they say to each other.

    dealing.py   who has taken part in an exchange, which parts of a pass are free: pure, without sockets
    shard.py     a server's shard of the parameters, and the user's optimizer for it
    serving.py   the loop of a server
    links.py     a worker's lines to the servers: requests, exchanges, parts to compute
    remote.py    the parameters as the servers own them: sending, pulling

Each message of a worker is a request that gets one answer, at once or when others have come. It is a JSON header with
"op", and tensors (comm/wire.py). Server 0, the first, is also the one where workers meet:

    op         to            what it asks                                            answer
    set        owners        take these weights (and this optimizer state)           done
    pull       owners        weights, by name                                        the weights
    push       owners        keep this shard's gradients, of reduction k             done
    sum        owners        the sum of reduction k over these workers, in order     the gradients
    final      owners        the gradients as they are to be used                    done
    update     owners        make update k of optimizer i, once, with this setting   its weights
    apply      owners        update optimizer i with this gradient, once per part    its weights
    state      owners        the optimizers' state                                   the tensors
    exchange   first         everyone's bytes, once all that live have come          the bytes
    begin      first         open a pass over the data                               done
    take       first         a part of the pass to compute                           a part, none, or "over"
    admit      first         may a gradient from version v be applied?               yes or no, the version
    pool       first         add sums, or take them                                  the sums
    join       first         let me in, at an exchange whose members allow it        its number, who is there
    join       others        I have been let in                                      done
    missing    first         who has not come, after a long wait                     ranks
    again      all           another `prepare` is coming: run on to it               when the server is there
    bye        all           this worker has ended                                   (none)
"""
