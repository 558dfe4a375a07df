"""What a checkpoint holds, how it is written and restored, and what a restart goes on from.

state.py: the parts of a run's state; checkpoint.py, manifest.py, atomic.py: files, hashes, and the newest whole
checkpoint; restarts.py: how a run goes on without a save by the script.
"""
