"""The Docker engine: where it is, how to call it, and the thread that its calls live in.

Nothing here knows of Jupyter or of what a sandbox is.
"""
