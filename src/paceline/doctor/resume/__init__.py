"""paceline doctor --resume: kill a training, resume it from its checkpoint, and compare it with an undisturbed run.

resume_command.py   the command: three runs of the script, and the report
resume_recorder.py  records the state before each update, the examples, and the gradients; kills the run when asked
resume_rules.py     finds the update at which the resumed run begins, and what differs there
"""
