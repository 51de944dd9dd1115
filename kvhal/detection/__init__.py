"""What is here: facts of the host, visible devices, adapters, and the choice of a platform."""
