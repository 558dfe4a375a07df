"""Recorders of `paceline verify`, in the processes of a run.

recorder.py          observes a run: makes each step start from a given state, and saves its results
record_files.py      the files of a rank: named tensors, whole states, the record of each step
backward_watch.py    changes of gradients between backward calls; trained tensors that are in no model
rng_draws.py         detects whether random numbers were drawn
collate_recorder.py  digests of the examples passed to a collate function; batches in reverse order
perturbation.py      dropout off; rounding changed on purpose, for the tolerances
rank_queries.py      the script's queries of rank and world size, and the answers to them
call_site.py         the line of the user's script that is running
script_tracer.py     traces the operations of each line of the script, after a fault was found
"""
