"""balance=True: give each process a share of the global batch that fits its speed.

balance.py   an observer that measures each process's own time, and decides on a new cut
own_time.py  a process's own time in each step, without the time that it waits for others
"""
