"""paceline export: a model out of a checkpoint, as a file that other programs read.

checkpoint_weights   which model of the checkpoint, and its tensors, in the dtype that was asked for
user_model           for ONNX: the model's class and example inputs, from the user's code
onnx_program         the model as an ONNX program, or why it cannot be one
onnx_check           the file run by onnxruntime beside the model in PyTorch
export_command       puts these together, writes the file whole, and says what is in it
"""
