"""Each process holds a part of the tokens of each example."""
