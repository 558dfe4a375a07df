"""paceline export: a model out of a checkpoint, as a file that other programs read.

checkpoint_weights   which model of the checkpoint, and its tensors, in the dtype that was asked for
user_model           for ONNX: the model's class and example inputs, from the user's code
onnx_program         the model as an ONNX program, or why it cannot be one
onnx_check           the file run by onnxruntime beside the model in PyTorch
export_command       puts these together, writes the file whole, and says what is in it

The traced batch has five examples: torch.export takes 0 and 1 for constants, and a number in the model's code should
not match by chance. Differences are measured from the model as trained, also where --dtype rounds the file. The
checksum is written last, and an older file's is removed first.
"""
