"""The ready-made loop: fit, evaluate, predict. (The package is not named fit because `paceline.fit` is the function.)

loop.py                        fit: epochs, steps, evaluations, checkpoints
fit_plan.py, fit_state.py      fit's checked arguments; fit's state, for callbacks and checkpoints
history.py, best.py            the values of each epoch; the best value and early stopping
evaluate.py, metric_target.py  evaluate and predict; the inputs of a metric
model_loss.py                  fit(model, None, ...): the loss that the model computes
callbacks.py, weight_averaging.py, profiler.py   callbacks; EMA and SWA; traces
lr_finder.py, micro_batch_finder.py, memory_trial.py, model_summary.py   lr_find, find_micro_batch, summary

Decisions such as early stopping use rank 0's values on all processes, so that all processes stop together.
"""
