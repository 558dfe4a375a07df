"""The ranks of a script that does not use Paceline, under `paceline verify`.

rank_program.py      the program of each rank: runs the script with the recorder
plain_recorder.py    records the updates of a run, and makes each update start from the state of the subject run
examples.py          records the examples of each batch, and yields the examples of all ranks in one process
batch_function.py    the script's function that makes batches, found and replaced
script_places.py     where the script makes its loaders and wrappers, and the calls of an update
step_draws.py        random numbers of a step that do not depend on the number of processes
batch_norm.py        batch norm in one process, over the examples of each rank
libraries.py         one device in libraries that take a number of devices
"""
