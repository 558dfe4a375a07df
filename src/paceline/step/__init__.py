"""From a loss to an update: exact over micro-batches, several losses, loaders and optimizers.

step.py drives three objects: ownership.py (which yield does a loss belong to), accounts.py (its weight) and updates.py.

yields.py, several_loaders.py         the yields of a loader; loops over several loaders
loss.py, loss_parts.py, closure.py    kinds of losses; the parts of a loss; the user's closure
tree_accounts.py, deterministic.py, environment_fingerprint.py   reproducible runs
precision.py, finite.py               autocast and the loss scale; gradients that are not finite
objective.py, learning_rate.py        optimizers that evaluate the loss themselves; larger batches
guards.py, left_gradients.py, call_check.py, warm_up.py, preparable.py, messages.py   misuse, and what is said to it
backends.py, heartbeat.py, excepthook.py, observer.py   torch's switches; the launcher; errors; tools that watch
"""
