"""What a checkpoint holds, how it is written and restored, and what a restart goes on from.

state.py: the parts of a run's state; checkpoint.py, manifest.py, atomic.py: files, hashes, and the newest whole
checkpoint; restarts.py: how a run goes on without a save by the script.

Writing in the background (background_write.py, snapshot.py):

- Before `save` returns everything is gathered, encoded and copied. The thread of rank 0 only writes files.
- `finish` runs within the collective in which rank 0 acts for all. So every rank gets the error of a failed write.
- Where an error ends the run there is no collective, and the writing rank waits alone.
- A rank that writes says so in a file (world.WRITES), and the launcher waits for it before it sends SIGTERM.
- Python exits with 0 where an exit function raises. So session's last exit function prints the error and sets 1.
"""
