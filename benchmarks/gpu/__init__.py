"""What a machine with one GPU shows of Paceline: `make gpu`.

    check.py        what a check is
    jobs.py         models with their data and losses, plain loops over them, and the same under Paceline
    right.py        is the model that of a plain loop?
    precisions.py   16 bits, clipping, and a gradient that is not finite
    data.py         batches on the device; checkpoints from one device on another
    ranks.py        NCCL with one rank, two ranks on one GPU, replicas in threads
    tools.py        torch.compile; verify, doctor and compare
    costs.py        synchronisations, launches and copies of a step
    one.py          runs one check, in a process of its own
    __main__.py     runs the checks of a part, one process after another, and writes the results

It runs from the source tree, with the torch that is there: PYTHONPATH=src python3 -m benchmarks.gpu
"""
