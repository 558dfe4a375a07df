"""Runs in the process of a trial of `paceline plan`.

step_measure.py    measures one step, and ends the script
step_inspection.py counts FLOPs, saved activations and outputs of layers during one step
"""
