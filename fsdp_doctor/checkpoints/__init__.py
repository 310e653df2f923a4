"""Reads, verifies and converts stored checkpoints of any format, without torch and without running a pickle.

files, dtypes, pickles                       parts that all formats use
torch_files, safetensors_files, dcp          the container formats
record, reading                              read a directory of any layout into one record
scanning                                     reads all bytes once: checksums, zeros, non-finite values
troubles, checks, verification               the kinds of damage, the table of checks, and the verdict
names, optimizer                             match tensor names, and key the optimizer by parameter names
pickle_writing, archives                     write the files of torch.save and DCP without torch
targets, copying, conversion                 plan where each tensor's bytes go, copy them, and run a conversion
"""
