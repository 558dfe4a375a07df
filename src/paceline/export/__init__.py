"""paceline export: write a model from a checkpoint to a file that other programs read.

checkpoint_weights   find the model in the checkpoint, and return its tensors in the requested dtype
user_model           for ONNX: the model's class and example inputs, from the user's code
onnx_program         make an ONNX program of the model, or explain why that is impossible
onnx_check           run the file with onnxruntime, and compare it with the model in PyTorch
export_command       combines these, writes the file atomically, and describes it
check_command        paceline check: verify checksums

The traced batch has five examples. torch.export treats sizes 0 and 1 as constants, and five is unlikely to match a
number in the model's code by chance. The file is compared with the model as trained, even if --dtype rounds the file.
The checksum is written last. Before that, the checksum of an older file is removed.
"""
