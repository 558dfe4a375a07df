"""paceline plan: memory and step time of each strategy on a described cluster, from one measured step of a script.

cluster.py         Cluster: nodes, devices, memory, links, speed; and the sizes and rates of the command line
device_figures.py  public figures of accelerators, and the fraction of their peak that public training runs reached
measurement.py     Measurement: one step of the script in one process
ranges.py          Range: low, middle, high
collectives.py     bytes and seconds of collectives over links within and between nodes
memory.py          memory of a device in parts, and the peak of a backward
cost_model.py      memory and step time of each strategy
limits.py          what runs out first
candidates.py      the strategies and products of strategies that a cluster allows
plan_table.py      the table
plan_command.py    the command
worker/            runs in the trial's process, and measures the step

All modules except plan_command.py are pure.
"""
