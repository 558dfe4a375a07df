"""`paceline compare`: run one script under each strategy for a few steps, and print one table.

All modules except worker/ run in the process of the command.

compare_command.py  the command: checks, trials in rounds, table, files
cases.py            the cases: each strategy with each precision and global batch
rounds.py           the trials of all cases, round after round
figures.py          compute the figures of a row from the ranks' records (pure)
loss_causes.py      why the losses of a case differ from those of `single` (pure)
recommendation.py   which strategy to use, and why, in a sentence (pure)
table.py            the table in the terminal (pure)
document.py         the JSON document of `--json`
html_page.py        the same document as an HTML page with charts
worker/             measure a run while it trains, in the processes of a trial
"""
