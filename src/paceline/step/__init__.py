"""From a loss to an update: exact over micro-batches, several losses, loaders and optimizers.

step.py drives ownership.py (which yield does a loss belong to?), accounts.py (the loss's weight) and updates.py.

yields.py, several_loaders.py         the yields of a loader; loops over several loaders
loss.py, loss_parts.py, closure.py    kinds of losses; the parts of a loss; the user's closure
tree_accounts.py, deterministic.py, environment_fingerprint.py   reproducible runs
precision.py, finite.py               autocast and the loss scale; gradients that are not finite
objective.py, learning_rate.py        optimizers that evaluate the loss themselves; larger batches
guards.py, left_gradients.py, call_check.py, warm_up.py, preparable.py   detect misuse
messages.py                           error messages
backends.py, freed_memory.py, heartbeat.py   torch's switches; malloc; progress reports to the launcher
flops.py                              counts FLOPs
excepthook.py, observer.py            uncaught errors; tools that observe runs
"""
