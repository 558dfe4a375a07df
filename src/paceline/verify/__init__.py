"""`paceline verify`: is the model the same on N processes as on one? The host's side is this folder.

verify_command.py     the command
decision.py           what follows from how the runs differ: the answer
comparison.py         the run in question beside the other runs, and how they differ
runs.py               the runs of one question: what they are called, how each is started
run_record.py         what one run has left: its ranks' records and tensors
differences.py        how two runs differ in a step (pure)
tolerances.py         how far rounding alone may take them apart, measured on the script itself (pure)
evidence.py           what a cause is found from; linear relations between gradients (pure)
evidence_runs.py      further runs, made for the evidence
cause_rules.py        from the evidence to the cause (pure)
rank_disagreement.py  causes that the ranks of the run in question show by themselves (pure)
run_level_answers.py   answers about runs that cannot be compared step by step
answer.py, claims.py  the answer, and its sentences, each bound to the runs that show it
traced_runs.py        further runs, with the script's lines traced, to find the line of a fault
fault_location.py     which line it is, from these traces (pure)
trace_diff.py         where two traces begin to differ (pure)
slicing.py            program slicing of the script's text: where a rank or a clock comes into a line (pure)
worker/               in the processes of a run: what records it while it trains
"""
