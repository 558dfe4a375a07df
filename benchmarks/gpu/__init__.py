"""What a machine with one GPU shows of Paceline, or with two: `make gpu`, `make gpu2`.

    check.py        what a check is
    jobs.py         models with their data and losses, plain loops over them, and the same under Paceline
    right.py        is the model that of a plain loop?
    precisions.py   16 bits, clipping, and a gradient that is not finite
    data.py         batches on the device; checkpoints from one device on another
    ranks.py        NCCL with one rank, two ranks on one GPU, replicas in threads
    tools.py        torch.compile; verify, doctor and compare
    costs.py        synchronisations, launches and copies of a step
    steps.py        what a step takes beside the same by hand: 1 ms, ResNet-50, GPT-2
    soak.py         two minutes in which nothing may grow
    several.py      two devices: `make gpu2`. overlap.py reads a trace, member.py is a rank that any launcher starts
    one.py          runs one check, in a process of its own
    __main__.py     runs the checks of a part, one process after another, and writes the results
    page.py         writes the page of the results

It runs from the source tree, with the torch that is there: PYTHONPATH=src python3 -m benchmarks.gpu
"""
