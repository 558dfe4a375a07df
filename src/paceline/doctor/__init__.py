"""paceline doctor: what is wrong with a script that has never heard of Paceline.

runner.py    the command: the launcher with watched workers, findings, exit code
findings.py  the causes: title, consequence, remedy
report.py    findings as text
worker.py    what each process runs
watch/       in the processes: what is seen of the script, written down in order
judge/       in the launcher's: what it means
"""
