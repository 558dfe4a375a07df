"""Save, restore and resume a run: checkpoints on disk, and restarts from newer states.

state.py: the parts of a run's state. checkpoint.py, manifest.py, atomic.py: files, hashes, and the newest intact
checkpoint. restarts.py: how a run resumes without a save by the script.

Writing in the background (background_write.py, snapshot.py):

- `save` gathers, encodes and copies everything before it returns. The thread of rank 0 only writes files.
- `finish` runs within the collective in which rank 0 acts for all ranks. So a failed write raises on every rank.
- If an error ends the run, there is no such collective, and the writing rank waits for its thread alone.
- During a write, a message file (world.WRITES) makes the launcher wait for the rank before it sends SIGTERM.
- Python exits with 0 even if an exit function raises. So the exit functions in session.py print the error and exit with
  code 1.
"""
