"""The ready-made loop: fit, evaluate, predict. (Not named fit, since `paceline.fit` is the function.)

loop.py                        fit: epochs, steps, evaluations, checkpoints
fit_plan.py, fit_state.py      its arguments, checked; what callbacks see and a checkpoint holds
history.py, best.py            the values of each epoch; which checkpoints are the best
evaluate.py, metric_target.py  evaluate and predict; what a metric gets
model_loss.py                  fit(model, None, ...): the model's own loss
callbacks.py, weight_averaging.py, profiler.py   events; EMA and SWA; traces
lr_finder.py, micro_batch_finder.py, memory_trial.py, model_summary.py   lr_find, find_micro_batch, summary

All processes act on rank 0's numbers where one decides (early stopping, the best model). So all stop together.
"""
