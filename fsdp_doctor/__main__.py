"""Runs the command for ``python -m fsdp_doctor``, also under ``torchrun -m fsdp_doctor``."""

from fsdp_doctor.cli.app import main

if __name__ == "__main__":
    main()
