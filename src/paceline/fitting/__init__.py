"""The ready-made loop: fit, evaluate, predict. (Not named fit, since `paceline.fit` is the function.)"""
