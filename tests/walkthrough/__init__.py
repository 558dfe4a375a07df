"""The walkthrough: eight training scripts, each beside the same job in plain PyTorch.

Read `job_a_image.py` first. Every `job_*.py` holds two functions: `paceline_job`, written as a user would write it, and
`plain_job`, the same training with the whole global batch on one device and no Paceline. The tests run the first on 1
to 4 processes, hand what was drawn (order, crops, masks) to the second, and compare weights, buffers, losses, counts.
"""
