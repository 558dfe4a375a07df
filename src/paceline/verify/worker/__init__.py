"""What records a run for `paceline verify`, in its processes.

recorder.py          observes a run: makes each step start from a given state, keeps what it computes
record_files.py      the files that a rank leaves: named tensors, whole states, the record of each step
sketches.py          large tensors in few numbers, to be compared
backward_watch.py    what happens to gradients between backward calls; tensors with gradients that are in no model
rng_draws.py         whether random numbers were drawn
collate_recorder.py  digests of the examples that a collate function is given; batches in reverse order
patches.py           functions in the place of torch's: dropout that drops nothing
perturbation.py      rounding moved on purpose, for the tolerances
rank_queries.py      what the script asks for its rank, and what it is told
call_site.py         which line of the user's is being run
script_tracer.py     what each line of the script does, once a fault was found
"""
