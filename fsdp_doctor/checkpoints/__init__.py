"""Checkpoints on disk, in any format: read without torch and without running a pickle, and verified at rest.

files, dtypes, pickles                       what every format is made of
torch_files, safetensors_files, dcp          the containers
record, reading                              a directory of any layout as one record
scanning                                     all bytes, once: checksums, zeros, what is not finite
troubles, checks, verification               what can be wrong, the table of checks, and the verdict
names, conversion                            the names of two checkpoints; any format as Hugging Face files
"""
