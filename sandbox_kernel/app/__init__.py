"""The command line ``jupyter sandbox``."""
