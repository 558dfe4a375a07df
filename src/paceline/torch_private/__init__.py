"""Every private name of torch that Paceline uses: imported, read and written in this folder, and nowhere else.

Private names may change with any version of torch. Each stands here with what it is needed for, under a name that says
what it does. Where versions of torch differ, the difference ends here. tests/test_torch_private.py tests each of them;
tests/test_architecture.py finds one that is used elsewhere.

    support               what is said where a name is missing
    core                  tensors, modules, optimizers, autograd: what `import torch` has loaded anyway
    reducer               the reducer of DistributedDataParallel
    fully_shard           FSDP2
    distributed_tensor    DTensor
    schedules             torch.distributed.pipelining
    dynamic_rendezvous    the state that torch's agents share, as JSON
    elastic               the agent of torch.distributed.elastic
    flight_recorder       the collective calls of this process that are under way
    observed              what the doctor reads of a foreign script's objects
"""
