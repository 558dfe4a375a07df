"""Tools on top of the launcher: they start runs, and read what the runs leave.

launch.py    paceline.launch: a function in several processes
compare.py   the command: trials in rounds, one table
cases.py     what is compared: strategies, precisions, batches
trials.py    one trial: a script for a few steps in fresh processes
results.py   from the ranks' records to figures (pure)
verdict.py   which one to take, and why, in a sentence (pure)
table.py     the table in the terminal (pure)
page.py      the same as an HTML page with charts; plotly
"""
