"""Checkpoints on disk, in any format: read without torch and without running a pickle, and verified at rest.

files, dtypes, pickles                       what every format is made of
torch_files, safetensors_files, dcp          the containers
record, reading                              a directory of any layout as one record
scanning                                     all bytes, once: checksums, zeros, what is not finite
troubles, checks, verification               what can be wrong, the table of checks, and the verdict
names, optimizer                             the names of two checkpoints; the optimizer by the names of parameters
pickle_writing, archives                     what torch.save and DCP write, without torch
targets, copying, conversion                 where each tensor's bytes go, their way there, and a conversion as a whole
"""
