"""`paceline verify`: is the model the same on N processes as on one? These modules run in the launcher, except workers.

verify_command.py     the command
decision.py           which runs are made, and the answer that follows from their differences
comparison.py         compares the subject run with its reference runs
runs.py               the runs of one comparison: their names, and how each is started
run_record.py         the records and tensors that a run writes
differences.py        the differences of two runs in a step (pure)
tolerances.py         the effect of rounding alone, measured on the script itself (pure)
evidence.py           the evidence for a cause; linear relations between gradients (pure)
evidence_runs.py      further runs, to gather evidence
cause_rules.py        finds the cause from the evidence (pure)
rank_disagreement.py  finds causes by comparing the ranks of the subject run with each other (pure)
run_level_answers.py  answers about runs that cannot be compared step by step
answer.py             the answer and its claims: sentences, and the runs that show them
traced_runs.py        further runs with the script's lines traced, to find the line of a fault
fault_location.py     finds the line of a fault in these traces (pure)
trace_diff.py         finds the first difference of two traces (pure)
plain_decision.py     for scripts that do not use Paceline: the answer
plain_reference.py    its runs of one process, and whether they can be compared
plain_subject.py      the subject run of such a script by itself
plain_location.py     finds the line of a difference in its record (pure)
hypotheses.py         which sum of the ranks' gradients a gradient is (pure)
left_out_updates.py   finds an update that a rank leaves out
worker/               recorders, in the processes of a run
plain_worker/         recorders of scripts that do not use Paceline
"""
