"""What a checkpoint holds, how it is written and restored, and what a restart goes on from.

state.py: the parts of a run's state; checkpoint.py, manifest.py, atomic.py: files, hashes, and the newest whole
checkpoint; newest_state.py, memory_checkpoints.py, preemption.py: restarts without a save by the script.
"""
