"""What a live job holds, on this rank's device and host, by class."""
