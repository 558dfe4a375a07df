"""`paceline compare`: one script under each strategy for a few steps, in one table. The host's side is this folder.

compare_command.py  the command: checks, trials in rounds, table, files
cases.py            what is compared: each strategy with each precision and global batch
rounds.py           the trials of all cases, round after round
figures.py          from the ranks' records to the figures of a row (pure)
recommendation.py   which strategy to take, and why, in a sentence (pure)
table.py            the table in the terminal (pure)
document.py         the JSON document that `--json` writes
html_page.py        the same document as an HTML page with charts
worker/             in the processes of a trial: what measures a run while it trains
"""
