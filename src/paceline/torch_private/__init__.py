"""Every private name of torch that Paceline uses. Only this folder imports, reads and writes them.

Private names may change with any version of torch. Each is defined here with its purpose, under a descriptive name.
Differences between versions of torch are handled here. tests/test_torch_private.py tests each name;
tests/test_architecture.py finds uses elsewhere.

    support               the error for a missing name
    core                  tensors, modules, optimizers, autograd: loaded by `import torch` anyway
    reducer               the reducer of DistributedDataParallel
    fully_shard           FSDP2
    distributed_tensor    DTensor
    dynamic_rendezvous    the shared state of torch's agents, as JSON
    elastic               the agent of torch.distributed.elastic
    flight_recorder       the pending collective calls of this process
    observed              the objects of a script under `paceline doctor`
    workers               the worker that this process is, for data sets that split themselves
    variables             environment variables that torch's native code reads
"""
