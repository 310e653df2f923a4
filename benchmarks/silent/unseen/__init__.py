"""Ten published errors, written by somebody who had not seen fsdp-doctor's code, each with its mended form.

The functions that are wrong are as their author wrote them, on torch, transformers and peft. The author wrote files and
knew no check; which command of fsdp-doctor judges a program was chosen afterwards.
"""
