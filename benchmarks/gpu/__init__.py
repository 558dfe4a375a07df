"""Checks of Paceline on a machine with one or two GPUs: `make gpu`, `make gpu2`.

    check.py        the definition of a check
    jobs.py         models with their data and losses, plain loops over them, and the same under Paceline
    right.py        does Paceline train the same model as a plain loop?
    precisions.py   16 bits, clipping, and a gradient that is not finite
    data.py         batches on the device; checkpoints moved between devices
    ranks.py        NCCL with one rank, two ranks on one GPU, replicas in threads
    tools.py        torch.compile; verify, doctor and compare
    costs.py        synchronisations, launches and copies of a step
    steps.py        the time of a step compared with a hand-written step: 1 ms, ResNet-50, GPT-2
    soak.py         two minutes of training without growth
    several.py      two devices: `make gpu2`. overlap.py reads a trace, member.py is a rank for any launcher
    one.py          runs one check in this process
    __main__.py     runs the checks of a part, each in a process, and writes the results
    page.py         writes the page of the results

It runs from the source tree, with the installed torch: PYTHONPATH=src python3 -m benchmarks.gpu
"""
