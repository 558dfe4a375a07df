"""From a loss to an update: exact over micro-batches, several losses, loaders and optimizers.

step.py drives it. yields.py: which yield a loss belongs to; gradients.py: the weight of a loss; loss.py: the kinds of
losses; finite.py: gradients that are not finite; precision.py: autocast and the loss scale; call_check.py: do all
processes make the same calls; messages.py: what is said to a script that does something else.
"""
